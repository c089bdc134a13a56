"""What the CUDA kernels share: cross-compilation without a GPU, and tiles."""
