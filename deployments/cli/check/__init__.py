"""`assay check`: finds mistakes in a configuration before anything starts."""
