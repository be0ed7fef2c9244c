"""Heads that read hidden states: what a model answers other than the next token."""
