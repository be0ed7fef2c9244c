"""Triton kernels, one file an op; their plain twins are in `gpu_sampler.reference`."""
