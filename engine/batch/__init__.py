"""Packs requests into the input arrays of one step."""
