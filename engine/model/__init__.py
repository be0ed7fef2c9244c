"""Loads, checks and runs a Hugging Face model."""
