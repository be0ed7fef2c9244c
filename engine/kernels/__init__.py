"""Triton kernels of decoder layers, with their references."""
