"""Anthropic's API over HTTP: messages, and how many tokens a conversation has."""
