"""The Ollama API over HTTP: chats, prompts and information about models."""
