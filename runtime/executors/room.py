"""Free memory of the devices of each kind of engine, before one is opened."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from trtc.runtime.host.machine import available_bytes


@dataclass(frozen=True)
class Place:
    """The memory that holds the weights, activations and KV pools of a kind of engine."""

    device: str
    """Name in messages."""
    extra: str = ""
    """Extra of trtc with the bindings of the driver; "": host memory."""

    @property
    def is_host(self) -> bool:
        return not self.extra

    def free_bytes(self) -> int:
        """Free bytes now.

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
"""Place by target.kind of the manifest."""
