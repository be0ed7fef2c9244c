"""Tokenizer, detokenizer and control tokens."""
