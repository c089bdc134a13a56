"""What a program (program.py) runs on: memory, launches, products, collectives, graphs, copies.

`GpuDevice` (gpu_device.py) is a GPU; tests stand in a device that interprets the kernels. Not
the contract of runtime/device/base.py, which is the driver's: here no address is seen, so that
memory may be an array of the interpreter's, and copies have staging memory of their own, so that
the host may write the next step's inputs while the last ones are under way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class HostBytes(Protocol):
    """Bytes that lie on the host, in memory or not."""

    @property
    def num_bytes(self) -> int: ...

    def read(self, begin: int, target: Bytes) -> None:
        """Fill `target` with those from `begin` on. From any thread.

        Raises:
            EngineCorruptError: they are gone.
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
    """Some bytes into a block."""

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
    """Elements from a row to the next."""


@dataclass(frozen=True)
class Product:
    """out = x @ weight.T (* input_scale * weight_scale) (+ residual) (+ bias)."""

    x: Operand
    weight: Operand
    out: Operand
    input_scale: Place | None
    weight_scale: Place | None
    uniform_scale: bool
    """All of `weight_scale` is one value."""
    bias: Place | None
    residual: Operand | None = None
    """Of the type of `out`, and perhaps `out` itself."""


@dataclass(frozen=True)
class Tiles:
    """Bytes of memory as a tensor map sees them; see protos/launch_plan.py's TileMap."""

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
    """A device's place among those of one engine."""

    rank: int
    ranks: int
    rendezvous: bytes
    """The same for all ranks: where they meet."""


@dataclass(frozen=True)
class Span:
    """So many bytes from a place on."""

    place: Place
    num_bytes: int


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueue it; returns at once."""
        ...

    def drop(self) -> None:
        """Free it, when all its work is done; `close` of its device frees what is left."""
        ...


class Download(Protocol):
    """A copy to the host under way."""

    def wait(self) -> Bytes:
        """Block until it and all work before it is done.

        Raises:
            EnvironmentFault: the device failed.
        """
        ...


class ProgramDevice(Protocol):
    """One GPU and one queue of work: everything runs in the order it was asked for."""

    def allocate(self, num_bytes: int) -> Memory:
        """Memory that is zero and aligned to 256 bytes.

        Raises:
            EnvironmentFault: there is too little.
        """
        ...

    def upload(self, data: HostBytes) -> Memory:
        """Memory that holds a copy of `data`; returns when the host's is free to change.

        Raises:
            EngineCorruptError: `data` is gone.
        """
        ...

    def map_tiles(self, tiles: Sequence[Tiles]) -> Memory:
        """Their tensor maps, one after another, each of TILE_MAP_BYTES.

        Raises:
            EnvironmentFault: the driver makes no such map.
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
        """Enqueue target = the sum of every rank's `source`, which all ask for at the same place of
        their queues; the two may be one."""
        ...

    def all_gather(self, source: Place, target: Place, num_bytes: int) -> None:
        """Enqueue target = every rank's `source`, one after another in their order."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` asks for, without running it."""
        ...

    def send(self, data: Bytes, target: Place) -> None:
        """Enqueue a copy of `data` from the host; `data` may change after it."""
        ...

    def fetch(self, source: Place, num_bytes: int) -> Download:
        """Enqueue a copy to the host."""
        ...

    def scatter(self, data: Bytes, targets: Sequence[Span]) -> None:
        """Enqueue copies from the host, one part of `data` after another; it may change after."""
        ...

    def gather(self, sources: Sequence[Span]) -> Download:
        """Enqueue copies to the host, where they lie one after another."""
        ...

    def copy(self, source: Place, target: Place, num_bytes: int) -> None:
        """Enqueue a copy within the device; the two do not overlap."""
        ...

    def wait(self) -> None:
        """Block until all work is done."""
        ...

    def abandon(self) -> None:
        """Another rank has failed, and work that waits for it may never end: whoever waits for the
        device gets an EnvironmentFault. From any thread."""
        ...

    def close(self) -> None:
        """Wait for all work and free everything."""
        ...
