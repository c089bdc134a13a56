"""A device that is this process: Triton's interpreter runs Triton's kernels, cuda_on_cpu those of
CUDA C++, and torch the products.

Only in a process where Triton was told to interpret before its import (see triton_kernels.py).
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support import cuda_on_cpu
from tests.support.library_product import library_product
from trtc.builder.evaluator import Exchange, alone
from trtc.plugins.gpu.sources import CudaSource
from trtc.runtime.executors.cuda.device import (
    HostBytes,
    Kernel,
    Operand,
    Place,
    Product,
    Span,
    Tiles,
)

Bytes = NDArray[np.uint8]

TORCH = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i4": torch.uint8,
    "u4": torch.uint8,
    "f4e2m1": torch.uint8,
    "i32": torch.int32,
}
_INTERPRETER = threading.Lock()
"""Triton's interpreter runs one kernel at a time; the ranks of a model are threads."""
POISON = 0xFF
"""What memory holds before anybody writes it: NaN in every floating-point type."""


@dataclass(frozen=True)
class HostMemory:
    tensor: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel()


@dataclass(frozen=True)
class _Replayed:
    work: Callable[[], None]

    def replay(self) -> None:
        self.work()

    def drop(self) -> None:
        """It holds nothing."""


@dataclass(frozen=True)
class _Fetched:
    data: Bytes

    def wait(self) -> Bytes:
        return self.data


@dataclass
class InterpretedDevice:
    """Implements ProgramDevice; a cubin is the key of its source."""

    sources: Mapping[str, Any]
    """Key (as the cubin's text) -> KernelSource or CudaSource."""
    launched: list[str] = field(default_factory=list)
    """Names of the kernels, products and collectives that ran."""
    exchange: Exchange = alone
    """Where this rank meets the others."""

    def allocate(self, num_bytes: int) -> HostMemory:
        return HostMemory(torch.full((num_bytes,), POISON, dtype=torch.uint8))

    def upload(self, data: HostBytes) -> HostMemory:
        copy = np.empty(data.num_bytes, np.uint8)
        data.read(0, copy)
        return HostMemory(torch.from_numpy(copy))

    def map_tiles(self, tiles: Sequence[Tiles]) -> HostMemory:
        maps = b"".join(
            cuda_on_cpu.tile_map(_array(one.place).ctypes.data, one.sizes, one.strides, one.box)
            for one in tiles
        )
        return HostMemory(torch.frombuffer(bytearray(maps), dtype=torch.uint8))

    def load(self, cubin: bytes, entry: str, num_threads: int, shared_bytes: int) -> Kernel:
        return Kernel(self.sources[cubin.decode()], entry, num_threads, shared_bytes)

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        arguments: Sequence[Place],
        *,
        overlaps: bool,
    ) -> None:
        source: Any = kernel.handle
        self.launched.append(kernel.name)
        if isinstance(source, CudaSource):
            cuda_on_cpu.launch(source, [_array(place) for place in arguments], grid, lazy=False)
            return
        tensors = [
            _typed(place, TORCH[parameter.dtype])
            for place, parameter in zip(arguments, source.parameters, strict=True)
        ]
        by_name = dict(zip((one.name for one in source.parameters), tensors, strict=True))
        by_name |= dict.fromkeys(source.absent)
        # Here nothing overlaps, and the interpreter has no such instructions.
        by_name |= source.constants | (
            {"OVERLAPS": False} if "OVERLAPS" in source.constants else {}
        )
        with _INTERPRETER:
            source.function[grid](**by_name)

    def multiply(self, product: Product) -> None:
        out = _matrix(product.out)
        columns = out.shape[1]
        library_product(
            out,
            _matrix(product.x),
            _matrix(product.weight),
            input_scale=_vector(product.input_scale, 1),
            weight_scale=_vector(product.weight_scale, columns),
            residual=None if product.residual is None else _matrix(product.residual),
            bias=_vector(product.bias, columns),
            row_scale=_vector(product.row_scale, len(out)),
        )
        self.launched.append("product")

    def all_reduce(self, source: Place, target: Place, num_elements: int, dtype: str) -> None:
        num_bytes = num_elements * TORCH[dtype].itemsize
        parts = self.exchange("all_reduce", _bytes(source, num_bytes).numpy().copy())
        total = sum(torch.from_numpy(part).view(TORCH[dtype]).float() for part in parts)
        assert isinstance(total, torch.Tensor)
        _bytes(target, num_bytes).copy_(total.to(TORCH[dtype]).view(torch.uint8))
        self.launched.append("all_reduce")

    def all_gather(self, source: Place, target: Place, num_bytes: int) -> None:
        parts = self.exchange("all_gather", _bytes(source, num_bytes).numpy().copy())
        whole = torch.from_numpy(np.concatenate(parts))
        _bytes(target, len(whole)).copy_(whole)
        self.launched.append("all_gather")

    def capture(self, work: Callable[[], None]) -> _Replayed:
        return _Replayed(work)

    def send(self, data: Bytes, target: Place) -> None:
        assert isinstance(target.memory, HostMemory)
        part = target.memory.tensor[target.offset : target.offset + len(data)]
        part.copy_(torch.from_numpy(data))

    def send_early(self, data: Bytes, target: Place) -> None:
        self.send(data, target)

    def fetch(self, source: Place, num_bytes: int) -> _Fetched:
        assert isinstance(source.memory, HostMemory)
        part = source.memory.tensor[source.offset : source.offset + num_bytes]
        return _Fetched(part.numpy().copy())

    def gather(self, sources: Sequence[Span]) -> _Fetched:
        parts = [self.fetch(span.place, span.num_bytes).data for span in sources]
        return _Fetched(np.concatenate(parts))

    def scatter(self, data: Bytes, targets: Sequence[Span]) -> None:
        ends = np.cumsum([span.num_bytes for span in targets])
        assert ends[-1] == len(data)
        for span, part in zip(targets, np.split(data, ends[:-1]), strict=True):
            self.send(part, span.place)

    def copy(self, source: Place, target: Place, num_bytes: int) -> None:
        assert isinstance(source.memory, HostMemory) and isinstance(target.memory, HostMemory)
        target.memory.tensor[target.offset : target.offset + num_bytes] = source.memory.tensor[
            source.offset : source.offset + num_bytes
        ]

    def wait(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


def _bytes(place: Place, num_bytes: int) -> torch.Tensor:
    assert isinstance(place.memory, HostMemory)
    return place.memory.tensor[place.offset : place.offset + num_bytes]


def _array(place: Place) -> Bytes:
    assert isinstance(place.memory, HostMemory)
    return place.memory.tensor[place.offset :].numpy()


def _typed(place: Place, dtype: torch.dtype) -> torch.Tensor:
    assert isinstance(place.memory, HostMemory)
    rest = place.memory.tensor[place.offset :]
    return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)


def _vector(place: Place | None, length: int) -> torch.Tensor | None:
    return None if place is None else _typed(place, torch.float32)[:length]


def _matrix(operand: Operand) -> torch.Tensor:
    flat = _typed(operand.place, TORCH[operand.dtype])
    return flat.as_strided((operand.rows, operand.columns), (operand.stride, 1))
