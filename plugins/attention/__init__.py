"""Shared parts of the attention operators."""
