"""Decides which requests run in which step."""
