"""KV events over ZeroMQ, for routers that read vLLM's events."""
