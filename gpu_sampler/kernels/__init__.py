"""Implements the sampler in Triton kernels, one file an op; `gpu_sampler.reference` has each op in plain numpy."""
