"""GEMM kernels, shared by the operators that multiply with a weight."""
