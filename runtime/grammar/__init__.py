"""Constrained decoding: compiles grammars to masks of tokens."""
