"""Services over gRPC, on one port: trtc.v1.Inference, KServe's, SMG's, health and reflection."""
