"""Optional speed-ups of a model: each may be switched off."""
