"""trtllm.TrtllmService: how gateways such as SMG and Dynamo ask TensorRT-LLM for tokens."""
