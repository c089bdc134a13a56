"""The HTTP port: metrics, probes and the dialects (protocols over HTTP)."""
