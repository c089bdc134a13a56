"""The API of Text Generation Inference over HTTP: generation, model information and health."""
