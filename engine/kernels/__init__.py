"""Implements the Triton kernels of decoder layers. Their float64 references are in tests/support/layer_kernels.py."""
