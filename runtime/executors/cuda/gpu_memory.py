"""Device memory by its addresses."""

from dataclasses import dataclass

from trtc.runtime.executors.cuda.device import Place


@dataclass(frozen=True)
class GpuMemory:
    """A block (implements Memory)."""

    address: int
    num_bytes: int


def address(place: Place) -> int:
    assert isinstance(place.memory, GpuMemory)
    return place.memory.address + place.offset
