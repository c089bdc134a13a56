"""Engines inside the servers of others."""
