"""inference.GRPCInferenceService: the KServe v2 protocol, as Triton's clients use it."""
