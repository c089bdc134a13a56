"""Random weights for engines that were built without any, for benchmarks.

Every value is finite and every step's activations stay finite, so kernels run at the speed that
real weights would give (no NaN, no denormals); the same engine gets the same bytes on every
machine. The plan has each tensor's distribution (`Weight.fill`).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from trtc.protos.plan import Fill, Weight

_BLOCK_BYTES = 1 << 22
"""Random bytes that are drawn once and repeated; drawing gigabytes would take minutes."""
_SEED = 20
_E4M3_EXPONENT_TOP = 0x40


def fill_weights(weights: Sequence[Weight], num_bytes: int) -> NDArray[np.uint8]:
    """A data section of `num_bytes`, 64-byte aligned, with every weight filled by its rule."""
    area = np.zeros(num_bytes + 64, np.uint8)
    area = area[-area.ctypes.data % 64 :][:num_bytes]
    blocks: dict[Fill, NDArray[np.uint8]] = {}
    for weight in weights:
        if weight.fill not in blocks:
            blocks[weight.fill] = _block(weight.fill)
        _repeat(blocks[weight.fill], area[weight.offset : weight.offset + weight.bytes])
    return area


def _repeat(block: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    whole = len(target) // len(block)
    body = target[: whole * len(block)].reshape(whole, len(block))
    body[:] = block
    target[whole * len(block) :] = block[: len(target) - whole * len(block)]


def _block(fill: Fill) -> NDArray[np.uint8]:
    random = np.random.Generator(np.random.Philox(_SEED))
    return _MAKERS[fill.element](random, fill)


def _f32(random: np.random.Generator, fill: Fill) -> NDArray[np.uint8]:
    values = fill.center + fill.spread * random.uniform(-1, 1, _BLOCK_BYTES // 4)
    return values.astype(np.float32).view(np.uint8)


def _bf16(random: np.random.Generator, fill: Fill) -> NDArray[np.uint8]:
    wide = _f32(random, fill).view(np.uint32)
    return (wide >> 16).astype(np.uint16).view(np.uint8)


def _f8e4m3(random: np.random.Generator, fill: Fill) -> NDArray[np.uint8]:
    # Without the exponent's top bit a value is below 2 and never NaN.
    return _integers(random, fill) & np.uint8(~_E4M3_EXPONENT_TOP & 0xFF)


def _compact(random: np.random.Generator, fill: Fill) -> NDArray[np.uint8]:
    # With the third bit of each nibble set, no value is zero or below 2^-7.
    return _integers(random, fill) | np.uint8(0x44)


def _integers(random: np.random.Generator, fill: Fill) -> NDArray[np.uint8]:
    return random.integers(0, 256, _BLOCK_BYTES, np.uint8)


def _zero_points(random: np.random.Generator, fill: Fill) -> NDArray[np.uint8]:
    # A u8 weight is a 4-bit zero point, one a byte.
    return _integers(random, fill) & np.uint8(0x0F)


def _e8m0(random: np.random.Generator, fill: Fill) -> NDArray[np.uint8]:
    return np.full(_BLOCK_BYTES, int(fill.center), np.uint8)


def _indices(random: np.random.Generator, fill: Fill) -> NDArray[np.uint8]:
    numbers = np.arange(_BLOCK_BYTES // 4, dtype=np.int32)
    if fill.spread:
        return (numbers % np.int32(fill.center)).view(np.uint8)
    return np.where(numbers < fill.center, numbers, np.int32(-1)).view(np.uint8)


_MAKERS: dict[str, Callable[[np.random.Generator, Fill], NDArray[np.uint8]]] = {
    "f32": _f32,
    "bf16": _bf16,
    "f8e4m3": _f8e4m3,
    "compact": _compact,
    "e8m0": _e8m0,
    "f4e2m1": _integers,
    "i32": _indices,
    "i8": _integers,
    "i4": _integers,
    "u4": _integers,
    "u8": _zero_points,
}
