"""Limits of requests that are the same for all engines."""

MAX_LOGPROBS = 20
"""Top log-probabilities that a request may get for each token."""
