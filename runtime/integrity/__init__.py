"""Verifies that an engine's files are those that were built, and that they stay unchanged."""
