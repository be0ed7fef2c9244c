"""Turns logits into tokens and log-probabilities. Knows slots and positions, not requests, HTTP or models."""
