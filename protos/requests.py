"""What requests may ask for, of whatever engine."""

MAX_LOGPROBS = 20
"""Likeliest tokens that a request may have reported for each of its own."""
