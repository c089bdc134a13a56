"""Launches one plugin's kernel between two plans."""

from collections.abc import Mapping, Sequence

import numpy as np

from trtc.plugins.tensorrt.grids import GRIDS
from trtc.protos.bundle import KernelFacts
from trtc.protos.stages import Launch
from trtc.runtime.device.base import DriverDevice, DriverKernel

_SCALARS: Mapping[str, str] = {"num_sequences": "B", "table_width": "P"}
"""Scalar parameter of kernels -> symbol of its value in a step."""


class LoadedLaunch:
    """A launch with a loaded kernel for each profile."""

    def __init__(
        self,
        device: DriverDevice,
        launch: Launch,
        kernels: Sequence[tuple[KernelFacts, DriverKernel]],
        page_size: int,
    ) -> None:
        """`kernels`: the kernels for this SM, numbered as in `launch.kernels`."""
        self._device = device
        self._launch = launch
        self._page_size = page_size
        self._kernels = [kernels[index] for index in launch.kernels]
        self._arguments: list[list[int | str]] = []
        """For each profile: addresses, and the symbols of scalars."""

    def bind(self, addresses: Mapping[str, int]) -> None:
        self._arguments = [
            [
                _SCALARS[parameter]
                if parameter in _SCALARS
                else addresses[self._launch.arguments[parameter]]
                for parameter in facts.parameters
            ]
            for facts, _ in self._kernels
        ]

    def enqueue(self, profile: int, extents: Mapping[str, int]) -> None:
        """Enqueue one launch."""
        facts, kernel = self._kernels[profile]
        self._device.launch(
            kernel,
            GRIDS[self._launch.op](facts, extents, self._page_size),
            [np.int32(extents[a]) if isinstance(a, str) else a for a in self._arguments[profile]],
        )
