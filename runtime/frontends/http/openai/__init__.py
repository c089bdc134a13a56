"""The OpenAI API over HTTP: models, chat completions, completions, responses."""
