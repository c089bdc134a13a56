"""The CUDA driver API of cuda-bindings; failed calls raise EnvironmentFault."""

import importlib
from typing import Any

from trtc.protos.errors import EnvironmentFault


class DriverRefusal(EnvironmentFault):
    """A driver function's status is not success."""

    def __init__(self, function: str, status: str, meaning: str) -> None:
        super().__init__(
            f"{function} failed: {meaning}",
            field="the CUDA driver",
            remedy="See nvidia-smi and dmesg; a GPU that has failed needs a new process",
        )
        self.status = status
        """Name of the status in CUresult."""


class DriverApi:
    """The functions of an initialised driver, by name."""

    def __init__(self, extra: str) -> None:
        """
        Args:
            extra: extra of trtc with cuda-bindings: "cuda".

        Raises:
            EnvironmentFault: the package, the driver or a GPU is missing.
        """
        self.driver = _import_driver(extra)
        """The module cuda.bindings.driver."""
        try:
            (status,) = self.driver.cuInit(0)
        except RuntimeError as error:  # what cuda-bindings says without libcuda.so.1
            raise EnvironmentFault(
                f"an engine for GPUs needs NVIDIA's driver, which does not load ({error})",
                field="libcuda.so.1",
                remedy="Install the driver; in a container, start it with GPUs (--gpus all); "
                "without a GPU, build with --target cpu",
            ) from error
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise EnvironmentFault(
                f"has no GPU to give ({self._describe(status)})",
                field="the CUDA driver",
                remedy="See nvidia-smi; in a container, start it with GPUs (--gpus all)",
            )

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a driver function; returns its results without the status: None, one or several.

        Raises:
            DriverRefusal: the driver refuses, or reports work that has failed.
        """
        status, *values = getattr(self.driver, function)(*arguments)
        self.check(function, status)
        return values[0] if len(values) == 1 else values

    def check(self, function: str, status: Any) -> None:
        """Raises DriverRefusal if a function's status is not success."""
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise DriverRefusal(function, status.name, self._describe(status))

    def _describe(self, status: Any) -> str:
        _, text = self.driver.cuGetErrorString(status)
        return f"{status.name}: {text.decode()}" if text else str(status)


def _import_driver(extra: str) -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise EnvironmentFault(
            f"an engine for GPUs needs it, and it does not load ({error})",
            field="cuda-bindings",
            remedy=f"pip install 'trtc[{extra}]'",
        ) from error
