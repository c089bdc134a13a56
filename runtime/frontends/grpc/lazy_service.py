"""A gRPC service that is imported on its first call.

Most servers are called over one protocol. Importing the messages and servicers of the others takes
as long as opening a small engine.
"""

import importlib
from collections.abc import Callable
from functools import cached_property
from typing import Any

import grpc

from trtc.runtime.frontends.grpc.calls import GrpcService


class LazyService(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # a class at run time
    """
    Args:
        name: name in paths, health checks and reflection.
        module: module that `make` imports.
    """

    def __init__(self, name: str, module: str, make: Callable[[], GrpcService]) -> None:
        self.name = name
        self._module = module
        self._make = make

    def preload(self) -> None:
        """Do the imports of the first call; may run in any thread."""
        importlib.import_module(self._module)

    @cached_property
    def loaded(self) -> GrpcService:
        return self._make()

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        name = self._method(handler_call_details.method)
        return self.loaded.methods.get(name) if name else None

    def is_probe(self, path: str) -> bool:
        """Whether the path's method needs no credentials."""
        name = self._method(path)
        return bool(name) and name in self.loaded.probes

    def _method(self, path: str) -> str:
        """The method's name; "": it belongs to another service."""
        service, _, name = path.removeprefix("/").rpartition("/")
        return name if service == self.name else ""
