"""Speculative decoding: who drafts, what is kept of it by request slot, and the verify step."""
