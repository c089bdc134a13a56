"""Checkpoint to engine directory."""
