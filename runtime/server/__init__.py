"""Serving: a protocol-free service, and the thin adapters that speak gRPC and HTTP for it."""
