"""GEMM kernels in Triton."""
