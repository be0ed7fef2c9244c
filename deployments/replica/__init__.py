"""Runs one engine behind methods that other processes call."""
