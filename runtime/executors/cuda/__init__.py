"""Runs CUDA engines: launch plans captured into graphs, one a bucket of steps."""
