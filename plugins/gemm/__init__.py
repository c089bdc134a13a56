"""Kernels that multiply with a weight, shared by the operators that do."""
