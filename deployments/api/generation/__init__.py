"""Turns completion and chat requests into engine requests, and token chunks into responses."""
