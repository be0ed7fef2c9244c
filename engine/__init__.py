"""Runs the model: requests in, tokens and scores out. Knows no HTTP, no Ray and no templates."""
