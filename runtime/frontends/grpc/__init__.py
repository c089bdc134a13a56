"""trtc.v1.Inference, health and reflection over gRPC."""
