"""Calls of an operator's own code about requests, in processes of their own."""
