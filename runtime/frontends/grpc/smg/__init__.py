"""trtllm.TrtllmService: the protocol between gateways such as SMG and Dynamo and TensorRT-LLM."""
