"""The device interface of a program (program.py): memory, launches, GEMMs, collectives, graphs,
copies.

`GpuDevice` (gpu_device.py) is a GPU; tests use a device that interprets the kernels. This differs
from runtime/device/base.py, the interface of the driver: here there are no addresses, so that
memory may be an array of the interpreter, and copies go through staging buffers, so that the host
can write the next step's inputs while the last ones are being copied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class HostBytes(Protocol):
    """Bytes on the host, in memory or in a file."""

    @property
    def num_bytes(self) -> int: ...

    def read(self, begin: int, target: Bytes) -> None:
        """Fill `target` with the bytes from `begin` on. Thread-safe.

        Raises:
            EngineCorruptError: they are no longer readable.
        """
        ...


@dataclass(frozen=True, eq=False)
class HostArray:
    """Bytes of an array (implements HostBytes)."""

    array: Bytes

    @property
    def num_bytes(self) -> int:
        return len(self.array)

    def read(self, begin: int, target: Bytes) -> None:
        np.copyto(target, self.array[begin : begin + len(target)])


class Memory(Protocol):
    """A block of device memory."""

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True)
class Place:
    """An offset in a block of memory."""

    memory: Memory
    offset: int


@dataclass(frozen=True)
class Operand:
    """A row-major matrix on the device."""

    place: Place
    dtype: str
    """Name in protos/dtypes.py."""
    rows: int
    columns: int
    stride: int
    """Elements from one row to the next."""


@dataclass(frozen=True)
class Product:
    """out = x @ weight.T (* input_scale or row_scale, * weight_scale) (+ residual) (+ bias)."""

    x: Operand
    weight: Operand
    out: Operand
    input_scale: Place | None
    weight_scale: Place | None
    uniform_scale: bool
    """Whether all of `weight_scale` is one value."""
    bias: Place | None
    residual: Operand | None = None
    """Has the type of `out`, and may be `out` itself."""
    row_scale: Place | None = None


@dataclass(frozen=True)
class Tiles:
    """Memory described by a tensor map; see protos/launch_plan.py's TileMap."""

    place: Place
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel, by the device's own handle."""

    handle: object
    name: str
    num_threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Seat:
    """A device's rank among the devices of one engine."""

    rank: int
    ranks: int
    rendezvous: bytes
    """NCCL's unique id, the same for all ranks."""


@dataclass(frozen=True)
class Span:
    """A range of bytes."""

    place: Place
    num_bytes: int


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueue it; returns at once."""
        ...

    def drop(self) -> None:
        """Free it, after all its work is done; `close` of its device frees remaining graphs."""
        ...


class Download(Protocol):
    """A copy to the host in flight."""

    def wait(self) -> Bytes:
        """Block until the copy and all work before it are done.

        Raises:
            EnvironmentFault: the device failed.
        """
        ...


class ProgramDevice(Protocol):
    """One GPU and one stream: all work runs in the order in which it was enqueued."""

    def allocate(self, num_bytes: int) -> Memory:
        """Memory that is zero and aligned to 256 bytes.

        Raises:
            EnvironmentFault: there is too little memory.
        """
        ...

    def upload(self, data: HostBytes) -> Memory:
        """Memory with a copy of `data`, which may change after the call.

        Raises:
            EngineCorruptError: `data` is no longer readable.
        """
        ...

    def map_tiles(self, tiles: Sequence[Tiles]) -> Memory:
        """Their tensor maps, one after another, each of TILE_MAP_BYTES.

        Raises:
            EnvironmentFault: the driver refuses a map.
        """
        ...

    def load(self, cubin: bytes, entry: str, num_threads: int, shared_bytes: int) -> Kernel:
        """Raises: EnvironmentFault: the driver refuses the code."""
        ...

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        arguments: Sequence[Place],
        *,
        overlaps: bool,
    ) -> None: ...

    def multiply(self, product: Product) -> None: ...

    def all_reduce(self, source: Place, target: Place, num_elements: int, dtype: str) -> None:
        """Enqueue target = the sum of all ranks' `source`. All ranks call it at the same point of
        their streams; source and target may be the same."""
        ...

    def all_gather(self, source: Place, target: Place, num_bytes: int) -> None:
        """Enqueue target = the `source` of all ranks, concatenated in the order of ranks."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record the work that `work` enqueues, without running it."""
        ...

    def send(self, data: Bytes, target: Place) -> None:
        """Enqueue a copy of `data` from the host; `data` may change after the call."""
        ...

    def send_early(self, data: Bytes, target: Place) -> None:
        """As `send`, but concurrent with work that was enqueued after the last `send`, which must
        neither read nor write `target`. Work enqueued later sees the copy."""
        ...

    def fetch(self, source: Place, num_bytes: int) -> Download:
        """Enqueue a copy to the host."""
        ...

    def scatter(self, data: Bytes, targets: Sequence[Span]) -> None:
        """Enqueue copies of consecutive parts of `data` from the host; `data` may change after the
        call."""
        ...

    def gather(self, sources: Sequence[Span]) -> Download:
        """Enqueue copies to the host, where they are concatenated."""
        ...

    def copy(self, source: Place, target: Place, num_bytes: int) -> None:
        """Enqueue a copy within the device; the two do not overlap."""
        ...

    def wait(self) -> None:
        """Block until all work is done."""
        ...

    def abandon(self) -> None:
        """Another rank has failed, and work that waits for it may never end: threads that wait for
        the device get an EnvironmentFault. Thread-safe."""
        ...

    def close(self) -> None:
        """Wait for all work and free everything."""
        ...
