"""Defines what a score is: prompts, templates, labels, formulas. Pure Python and numpy: no Ray, no HTTP, no torch."""
