"""Text to token ids and back; conversations to text."""
