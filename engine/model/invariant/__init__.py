"""Layers whose rows have the same bits whatever else is in the step: `engine.numerics: invariant`."""
