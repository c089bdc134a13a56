"""The API of Text Generation Inference over HTTP: generation, what is served, and health."""
