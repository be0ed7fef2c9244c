"""Makes what the model reads: chat templates, pair templates and presets, questions with options, and the sandbox."""
