"""Driver-level interface of a GPU: addresses, copies, kernels and graphs, in order on one stream.

TensorRT's executor uses it, because TensorRT needs raw addresses and the handle of a stream. The
executor of CUDA engines uses a device with a higher-level interface (executors/cuda/device.py):
GEMMs and collectives, but neither addresses nor a stream. On a GPU that device uses the same driver
(cuda_driver.py); the interfaces are separate because neither executor needs the other's methods.

All operations are asynchronous: they are enqueued on the stream, and `synchronize` waits for them.
Until then host arrays that are involved must not be read or written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

ALIGNMENT = 256
"""Alignment in bytes of every address from `allocate`."""


@dataclass(frozen=True)
class DriverKernel:
    """A loaded kernel and the shape of its blocks."""

    handle: int
    num_threads: int
    """Threads of a block, along x."""
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
        """Make the GPU's context current in the calling thread, which all other methods require."""
        ...

    def free_bytes(self) -> int: ...

    def allocate(self, num_bytes: int) -> int:
        """Address of `num_bytes` of device memory, held until `close`."""
        ...

    def host_buffer(self, num_bytes: int) -> Bytes:
        """Page-locked memory for asynchronous copies, held until `close`."""
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
        """Capture the work that `work` enqueues, without running it.

        Returns:
            A graph for `replay`; None: some of the work cannot be captured.
        """
        ...

    def replay(self, graph: int) -> None: ...

    def drop_graph(self, graph: int) -> None: ...

    def synchronize(self) -> None:
        """Wait for all work on the stream."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...
