"""Servers that break off, answer nonsense, or mean harm."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

GARBAGE = b"\xff\xff\xff"


class Nonsense(grpc.GenericRpcHandler):
    """Answers Generate with `replies`, GetModelInfo with `info`, all else with garbage."""

    def __init__(self, replies: list[bytes], info: bytes) -> None:
        self._replies = replies
        self._info = info

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method.endswith("/Generate"):
            return grpc.unary_stream_rpc_method_handler(lambda *_: iter(self._replies))
        answer = self._info if details.method.endswith("/GetModelInfo") else GARBAGE
        return grpc.unary_unary_rpc_method_handler(lambda *_: answer)


@contextmanager
def broken_server(replies: list[bytes], info: bytes = GARBAGE) -> Iterator[str]:
    """Its address."""
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Nonsense(replies, info)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
