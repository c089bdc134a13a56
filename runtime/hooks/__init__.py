"""Calls an operator's own code for requests, in separate processes."""
