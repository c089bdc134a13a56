"""Anthropic's API over HTTP: messages and token counting."""
