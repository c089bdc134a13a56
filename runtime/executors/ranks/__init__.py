"""Runs one engine in several processes, one per tensor-parallel rank."""
