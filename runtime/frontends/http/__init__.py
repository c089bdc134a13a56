"""The HTTP port: metrics and probes."""
