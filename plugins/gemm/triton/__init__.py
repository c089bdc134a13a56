"""Those in Triton."""
