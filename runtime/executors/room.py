"""How much memory is free where engines of each kind run, before one is opened."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from trtc.runtime.host.machine import available_bytes


@dataclass(frozen=True)
class Place:
    """Where engines of a kind have their weights, activations and KV pool."""

    device: str
    """As people call it."""
    extra: str = ""
    """Of trtc, that brings the driver; "": the host's memory."""

    @property
    def is_host(self) -> bool:
        return not self.extra

    def free_bytes(self) -> int:
        """
        Raises:
            EnvironmentFault: there is no such device.
        """
        if self.is_host:
            return available_bytes()
        from trtc.runtime.device.cuda_driver import CudaDriverDevice
        from trtc.runtime.device.driver_api import DriverApi

        with closing(CudaDriverDevice(DriverApi(self.extra))) as gpu:
            return gpu.free_bytes()


PLACES: Mapping[str, Place] = {
    "cpu": Place("the host's memory"),
    "cuda": Place("GPU memory", "cuda"),
    "tensorrt": Place("GPU memory", "tensorrt"),
    "tensorrt_rtx": Place("GPU memory", "tensorrt"),
}
"""By target.kind of the manifest."""
