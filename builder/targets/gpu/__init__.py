"""Kernels compiled for a GPU, without one: the drivers of Triton and NVRTC."""
