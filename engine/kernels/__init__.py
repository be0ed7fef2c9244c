"""Implements Triton kernels of decoder layers, with float64 references."""
