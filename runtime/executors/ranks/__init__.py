"""Runs one engine in several processes, a rank of tensor parallelism each."""
