"""KServe's v2 protocol over HTTP, with Triton's extensions for binary tensors and generation."""
