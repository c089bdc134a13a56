"""The HTTP port: metrics, probes and dialects."""
