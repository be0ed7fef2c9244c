"""Compiles ahead of the first request."""
