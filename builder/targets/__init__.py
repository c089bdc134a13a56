"""Lowering a fused graph to what a device runs: the contract in base.py, one file a target."""
