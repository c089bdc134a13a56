"""An engine as a model of NVIDIA's Triton Inference Server, through its Python backend."""
