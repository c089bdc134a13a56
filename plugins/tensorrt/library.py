"""The libraries that make and run plans: TensorRT, and TensorRT for RTX with the same API."""

import importlib
from dataclasses import dataclass
from typing import Any

from trtc.protos.errors import EnvironmentFault


@dataclass(frozen=True)
class Vendor:
    """A library that is installed apart from trtc."""

    module: str
    title: str
    install: str
    """Remedy on a machine that lacks it."""


TENSORRT = Vendor(
    "tensorrt",
    "TensorRT",
    "Install TensorRT 11 from NVIDIA's index (pip install 'trtc[tensorrt]') on the GPU host",
)
TENSORRT_RTX = Vendor("tensorrt_rtx", "TensorRT for RTX", "pip install 'trtc[tensorrt-rtx]'")


def load_vendor(vendor: Vendor, purpose: str) -> Any:
    """The library's module.

    Args:
        purpose: what it is wanted for, as in "is needed to {purpose}".

    Raises:
        EnvironmentFault: it, or its shared library, is not installed.
    """
    try:
        return importlib.import_module(vendor.module)
    except (ImportError, OSError) as error:
        raise EnvironmentFault(
            f"{vendor.title} is needed to {purpose} and does not load ({error})",
            field=vendor.module,
            remedy=vendor.install,
        ) from error


def make_logger(trt: Any) -> Any:
    """An ILogger that keeps `last_error` and `warnings`, and writes nothing."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last_error = "it gave no reason"
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.last_error = message
            elif severity == trt.ILogger.WARNING:
                self.warnings.append(message)

    return Log()
