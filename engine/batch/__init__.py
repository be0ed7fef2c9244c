"""Packs scheduled sequences into the input arrays of one step."""
