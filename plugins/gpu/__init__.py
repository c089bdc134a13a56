"""Shared parts of GPU kernels: facts of each SM, lowering, launches, and includes."""
