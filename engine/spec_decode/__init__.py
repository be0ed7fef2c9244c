"""Implements speculative decoding: draft proposers, their state, and the verify step."""
