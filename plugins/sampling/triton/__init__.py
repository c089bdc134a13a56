"""Triton kernels of the sampler, one stage a file."""
