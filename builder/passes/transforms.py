"""Pure functions of weights that passes put into recipes.

They are frozen records, not closures: two equal transforms of equal sources are one weight, and
passes can see that.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.layouts import MOST_IN_PLANES, pack, pack_columns, pack_planes
from trtc.plugins.rounding import cast
from trtc.plugins.tiles import tile

Array = NDArray[Any]

_SLICE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class ScalePerRow:
    """A weight scale as [rows, groups] f32, whatever it was: (), [1], [rows] or [rows, groups]."""

    rows: int

    def __call__(self, scale: Array) -> Array:
        values = scale.astype(np.float32)
        if values.size == 1:
            return np.full((self.rows, 1), values.reshape(-1)[0], np.float32)
        return np.ascontiguousarray(values.reshape(self.rows, -1))


@dataclass(frozen=True)
class ZeroPerRow:
    """Zero points as [rows, groups] u8."""

    rows: int

    def __call__(self, zero: Array) -> Array:
        return np.ascontiguousarray(zero.astype(np.uint8).reshape(self.rows, -1))


@dataclass(frozen=True)
class RequantizeToE4M3:
    """Grouped 4-bit weights -> the E4M3 weights that QuantizeLinear makes of their real values.

    Called with weight [N, K], scale [N, G], the E4M3 scale () and, with zero points, zero [N, G].
    Rounds where the graph does: to `through` after DequantizeLinear, then to E4M3.
    """

    through: str

    def __call__(self, weight: Array, scale: Array, scale_2: Array, *zero: Array) -> Array:
        group = weight.shape[1] // scale.shape[1]
        values = weight.astype(np.float32)
        if zero:
            values -= np.repeat(zero[0].astype(np.float32), group, axis=1)
        values *= np.repeat(scale.astype(np.float32), group, axis=1)
        values = cast(values, self.through).astype(np.float32)
        return cast(values / scale_2.astype(np.float32), "f8e4m3")


@dataclass(frozen=True)
class Pack:
    """[N, K], or [E, N, K], -> the bytes of plugins/layouts.py."""

    dtype: str
    keeps_shape: bool = False
    """For bytes as many as elements: [N, K], of whose axes lookups must know."""

    def __call__(self, weight: Array) -> Array:
        packed = pack(weight, self.dtype)
        return packed.reshape(weight.shape) if self.keeps_shape else packed


@dataclass(frozen=True)
class PackPlanes:
    """int8 [N, K] -> the bytes of layout planes, as Pack."""

    keeps_shape: bool = False

    def __call__(self, weight: Array) -> Array:
        packed = pack_planes(weight)
        return packed.reshape(weight.shape) if self.keeps_shape else packed


@dataclass(frozen=True)
class PackColumns:
    """Scales or zero points [N, G], or [E, N, G], of a packed weight."""

    def __call__(self, values: Array) -> Array:
        return pack_columns(values)


@dataclass(frozen=True)
class GroupCodes:
    """int8 codes of a weight [N, K]: value = code * the scale of its row and group of K."""

    group: int

    def __call__(self, weight: Array) -> Array:
        codes = np.empty(weight.shape, np.int8)
        for rows in _slices(weight):
            for first in range(0, weight.shape[1], self.group):
                columns = slice(first, first + self.group)
                part = weight[rows, columns].astype(np.float32)
                scale = _group_scale(part)
                scale[scale == 0] = 1
                codes[rows, columns] = np.rint(part / scale)
        return codes


@dataclass(frozen=True)
class GroupScales:
    """The scales [N, G] of GroupCodes: each group's largest magnitude is MOST_IN_PLANES, so that
    layout planes takes its codes."""

    group: int

    def __call__(self, weight: Array) -> Array:
        groups = range(0, weight.shape[1], self.group)
        scales = np.empty((len(weight), len(groups)), np.float32)
        for rows in _slices(weight):
            for index, first in enumerate(groups):
                part = weight[rows, first : first + self.group].astype(np.float32)
                scales[rows, index : index + 1] = _group_scale(part)
        return scales


def _group_scale(part: Array) -> Array:
    scale: Array = np.max(np.abs(part), axis=1, keepdims=True) / np.float32(MOST_IN_PLANES)
    return scale


def _slices(weight: Array) -> Iterator[slice]:
    """Rows at a time: an lm_head in fp32 would be the largest thing that a build holds."""
    rows = max(1, _SLICE_ELEMENTS // weight.shape[1])
    return (slice(first, first + rows) for first in range(0, len(weight), rows))


@dataclass(frozen=True)
class Tile:
    """[..., N, columns] -> the same elements in the order of plugins/tiles.py."""

    width: int

    def __call__(self, array: Array) -> Array:
        return tile(array, self.width)
