"""trtc: compile large language models ahead of time, then serve them.

    engine = trtc.build("checkpoint", dtype="fp8", output="engine")
    with trtc.open_engine(engine) as local:
        for output in local.generate("import os", max_tokens=16): ...
    trtc.Client("127.0.0.1:8001").generate("import os", max_tokens=16).result().text

Names are imported when they are first used, so `import trtc` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trtc.version import __version__

if TYPE_CHECKING:
    from trtc.api import build, open_engine
    from trtc.protos import errors
    from trtc.protos.errors import TrtcError
    from trtc.runtime.client import AsyncClient, Client
    from trtc.runtime.requests.completion import Result
    from trtc.runtime.requests.request import Output

__all__ = [
    "AsyncClient",
    "Client",
    "Output",
    "Result",
    "TrtcError",
    "__version__",
    "build",
    "errors",
    "open_engine",
]

_HOMES = {
    "AsyncClient": "trtc.runtime.client",
    "Client": "trtc.runtime.client",
    "Output": "trtc.runtime.requests.request",
    "Result": "trtc.runtime.requests.completion",
    "TrtcError": "trtc.protos.errors",
    "build": "trtc.api",
    "open_engine": "trtc.api",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("trtc.protos.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'trtc' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
