"""Limits of requests, the same for every engine."""

MAX_LOGPROBS = 20
"""Top log-probabilities that a request may get for each token."""
