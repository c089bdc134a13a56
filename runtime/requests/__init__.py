"""Requests and their results: types, defaults, and every check of a field."""
