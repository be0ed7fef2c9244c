"""What a score is: prompts, labels, formulas. No Ray, no HTTP, no CUDA."""
