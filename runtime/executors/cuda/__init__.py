"""Runs CUDA engines: launch plans captured into CUDA graphs, one per bucket of steps."""
