"""A load test of a running service: when requests are due, what they ask, what came of them, how it is told."""
