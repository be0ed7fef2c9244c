"""Implements the sampler in plain numpy with float64 sums: the oracle of every kernel, and the CPU backend."""
