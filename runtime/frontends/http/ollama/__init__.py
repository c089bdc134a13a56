"""The Ollama API over HTTP: chats, prompts and what is told of models."""
