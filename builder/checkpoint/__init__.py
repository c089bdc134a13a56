"""Reading Hugging Face checkpoints, tensor by tensor."""
