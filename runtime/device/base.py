"""A GPU as its driver gives it: addresses, copies, kernels and graphs, in order on one stream.

TensorRT's executor works with it, because TensorRT computes by itself and asks for just that: bare
addresses, and the handle of a stream to put its work on. The executor of CUDA engines computes
through a device that does more and shows less (executors/cuda/device.py): products and sums over
ranks, but neither addresses nor a stream. On a GPU that one works through the same driver
(cuda_driver.py), but one contract would hold what either half never calls.

Nothing that takes time returns done: work is put on the stream, and `synchronize` waits for it.
Until then host arrays that take part may be neither read nor written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

ALIGNMENT = 256
"""Bytes: of every address that `allocate` gives."""


@dataclass(frozen=True)
class DriverKernel:
    """A loaded function and the shape of its blocks."""

    handle: int
    num_threads: int
    """Of a block, along x."""
    shared_bytes: int


class DriverDevice(Protocol):
    """One GPU, one context, one stream that is not the default one.

    Every method raises EnvironmentFault when the driver refuses.
    """

    @property
    def stream(self) -> int:
        """Handle of the stream, for libraries that enqueue on it."""
        ...

    def make_current(self) -> None:
        """Bind the GPU to the calling thread, which every other method wants."""
        ...

    def free_bytes(self) -> int: ...

    def allocate(self, num_bytes: int) -> int:
        """Address of `num_bytes` of device memory, held until `close`."""
        ...

    def host_buffer(self, num_bytes: int) -> Bytes:
        """Page-locked memory that copies run to and from by themselves, held until `close`."""
        ...

    def load_kernel(self, code: bytes, entry: str) -> int:
        """Handle of a function of a cubin."""
        ...

    def upload(self, address: int, source: Bytes) -> None:
        """Copy a host buffer, or part of one, to the device."""
        ...

    def download(self, target: Bytes, address: int) -> None: ...

    def copy(self, target: int, source: int, num_bytes: int) -> None: ...

    def zero(self, address: int, num_bytes: int) -> None: ...

    def launch(
        self, kernel: DriverKernel, grid: tuple[int, int], arguments: Sequence[int | np.int32]
    ) -> None:
        """Start a kernel: addresses are plain integers, scalars are int32."""
        ...

    def capture(self, work: Callable[[], None]) -> int | None:
        """Record what `work` puts on the stream, without running it.

        Returns:
            A graph for `replay`; None: something in it cannot be recorded.
        """
        ...

    def replay(self, graph: int) -> None: ...

    def drop_graph(self, graph: int) -> None: ...

    def synchronize(self) -> None:
        """Wait for all that is on the stream."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...
