"""Clients of a running server: `Client` blocks, `AsyncClient` awaits; both speak trtc.v1."""

from trtc.runtime.client.aio import AsyncClient, AsyncGeneration
from trtc.runtime.client.blocking import Client, Generation
from trtc.runtime.requests.generate_options import GenerateOptions
from trtc.runtime.wire.tls import ClientTls

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "Client",
    "ClientTls",
    "GenerateOptions",
    "Generation",
]
