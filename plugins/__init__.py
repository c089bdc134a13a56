"""Fused operators: one folder an operator, one definition for every target."""
