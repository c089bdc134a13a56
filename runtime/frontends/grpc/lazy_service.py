"""A service of the port that is imported when it is first called.

Most servers are called by one protocol. The others' messages and servicers take as long to import
as a small engine takes to open.
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
        name: as in paths, health checks and reflection.
        module: what `make` imports.
    """

    def __init__(self, name: str, module: str, make: Callable[[], GrpcService]) -> None:
        self.name = name
        self._module = module
        self._make = make

    def preload(self) -> None:
        """Do the imports of the first call; in any thread."""
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
        """Whether the method answers callers without credentials."""
        name = self._method(path)
        return bool(name) and name in self.loaded.probes

    def _method(self, path: str) -> str:
        """The method's name; "": it is another service's."""
        service, _, name = path.removeprefix("/").rpartition("/")
        return name if service == self.name else ""
