"""Messages of `trtllm.TrtllmService`, by which SMG routes to TensorRT-LLM."""
