"""Requests and replies as tensors, in the names of NVIDIA's tensorrtllm_backend."""
