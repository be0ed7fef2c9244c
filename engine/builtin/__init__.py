"""The model that comes with Assay: a tiny target, its draft and their tokenizer."""
