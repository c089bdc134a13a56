"""Device memory as torch's byte tensors."""

from dataclasses import dataclass

import torch

from trtc.runtime.executors.cuda.device import Operand, Place

_TORCH = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "i8": torch.int8,
}


@dataclass(frozen=True)
class TorchMemory:
    """A block as a byte tensor (implements Memory)."""

    tensor: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel()


def address(place: Place) -> int:
    return _tensor_of(place).data_ptr() + place.offset


def part(place: Place, num_bytes: int) -> torch.Tensor:
    """Bytes from a place on; a view."""
    return _tensor_of(place)[place.offset : place.offset + num_bytes]


def matrix(operand: Operand) -> torch.Tensor:
    """[rows, columns] in the operand's type; a view."""
    dtype = _TORCH[operand.dtype]
    length = ((operand.rows - 1) * operand.stride + operand.columns) * dtype.itemsize
    flat = part(operand.place, length).view(dtype)
    return flat.as_strided((operand.rows, operand.columns), (operand.stride, 1))


def vector(place: Place, length: int) -> torch.Tensor:
    """[length] f32; a view."""
    return part(place, 4 * length).view(torch.float32)


def _tensor_of(place: Place) -> torch.Tensor:
    assert isinstance(place.memory, TorchMemory)
    return place.memory.tensor
