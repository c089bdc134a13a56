"""Frontends: each is one protocol's way into engines."""
