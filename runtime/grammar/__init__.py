"""Constrained decoding: grammars become masks of tokens."""
