"""Pure functions of weights that recipes apply.

They are frozen records, not closures: two equal transforms of equal sources are one weight, and
passes can see that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.compact import compact_scales, pack_compact
from trtc.plugins.iq4 import scale_codes, scale_units
from trtc.plugins.layouts import (
    MOST_IN_PLANES,
    pack,
    pack_columns,
    pack_planes,
)
from trtc.plugins.products import e8m0_values
from trtc.plugins.rounding import NUMPY_DTYPES, cast
from trtc.plugins.six_bits import split
from trtc.plugins.tiles import tile
from trtc.protos.errors import CheckpointError
from trtc.quant.site_format import SiteFormat

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
class UnitPerRow:
    """A scale () of E4M3 scales as [rows]."""

    rows: int

    def __call__(self, unit: Array) -> Array:
        return np.full(self.rows, unit.astype(np.float32), np.float32)


@dataclass(frozen=True)
class E4m3Bits:
    """E4M3 scales as bytes.

    Raises:
        CheckpointError: one is NaN, which kernels would take for 480.
    """

    def __call__(self, scale: Array) -> Array:
        bits: Array = scale.view(np.uint8)
        if bool(np.any(bits & 0x7F == 0x7F)):
            raise CheckpointError(
                "a group's scale is NaN", remedy="Download or export the checkpoint again"
            )
        return bits


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

    def __call__(self, weight: Array) -> Array:
        return pack(weight, self.dtype)


@dataclass(frozen=True)
class Split:
    """6-bit codes int8 [..., K] -> the bytes of layout split (plugins/six_bits.py)."""

    def __call__(self, weight: Array) -> Array:
        return split(weight)


@dataclass(frozen=True)
class PackPlanes:
    """int8 [N, K] -> the bytes of layout planes."""

    def __call__(self, weight: Array) -> Array:
        return pack_planes(weight)


@dataclass(frozen=True)
class PackCompact:
    """bf16 [N, K], or [E, N, K], -> the bytes of plugins/compact.py."""

    def __call__(self, weight: Array) -> Array:
        return pack_compact(weight)


@dataclass(frozen=True)
class CompactScales:
    """The scales [..., N, 1] of PackCompact."""

    def __call__(self, weight: Array) -> Array:
        return compact_scales(weight)


@dataclass(frozen=True)
class E8m0Values:
    """E8M0 scales, u8, as f32."""

    def __call__(self, scale: Array) -> Array:
        return e8m0_values(scale)


@dataclass(frozen=True)
class ScaleUnits:
    """Scales [N, G] of iq4 weights -> the unit of each row's bytes [N]."""

    def __call__(self, scale: Array) -> Array:
        return scale_units(scale)[:, 0]


@dataclass(frozen=True)
class ScaleCodes:
    """Scales [N, G] of iq4 weights -> their bytes in the units of ScaleUnits."""

    def __call__(self, scale: Array) -> Array:
        return scale_codes(scale, scale_units(scale))


@dataclass(frozen=True)
class PadGroups:
    """Scales [..., G] that are bytes in rows of `length`, with `byte` behind the last."""

    length: int
    byte: int

    def __call__(self, scale: Array) -> Array:
        rest = [(0, 0)] * (scale.ndim - 1)
        return np.pad(scale, [*rest, (0, self.length - scale.shape[-1])], constant_values=self.byte)


@dataclass(frozen=True)
class PackColumns:
    """Scales or zero points [N, G], or [E, N, G], of a packed weight."""

    def __call__(self, values: Array) -> Array:
        return pack_columns(values)


GroupScale = Callable[[Array], Array]
"""Parts [rows, group] of a weight in f32 -> the scales [rows, 1] of their codes."""


def scale_in_planes(part: Array) -> Array:
    """The largest magnitude becomes MOST_IN_PLANES, so that layout planes takes the codes."""
    scale: Array = np.max(np.abs(part), axis=1, keepdims=True) / np.float32(MOST_IN_PLANES)
    return scale


def power_of_two_scale(part: Array) -> Array:
    """The power of two that makes the largest magnitude a code of 64 to 127.

    Numbers of 4 significant bits, as E4M3 has, then have integer codes of at most 120 as far down
    as three binades below the largest.
    """
    largest = np.max(np.abs(part), axis=1, keepdims=True)
    _, exponent = np.frexp(largest)  # largest = mantissa in [0.5, 1) times 2^exponent
    scale: Array = np.where(largest > 0, np.ldexp(np.float32(1), exponent - 7), np.float32(0))
    return scale


@dataclass(frozen=True)
class GroupCodes:
    """int8 codes of a weight [..., K]: value = code * the scale of its row and group of K.

    Raises:
        CheckpointError: a value is NaN or infinite.
    """

    group: int
    scale_of: GroupScale = scale_in_planes

    def __call__(self, weight: Array) -> Array:
        codes = np.empty(weight.shape, np.int8)
        rows = codes.reshape(-1, weight.shape[-1])
        for place, part in _groups(weight, self.group):
            if not np.all(np.isfinite(part)):
                raise CheckpointError(
                    "a weight holds NaN or infinity", remedy="Quantise the checkpoint again"
                )
            scale = self.scale_of(part)
            scale[scale == 0] = 1
            rows[place] = np.rint(part / scale)
        return codes


@dataclass(frozen=True)
class GroupScales:
    """The scales [..., G] of GroupCodes; times those [..., 1] that the weight has, if it has."""

    group: int
    scale_of: GroupScale = scale_in_planes

    def __call__(self, weight: Array, *row_scale: Array) -> Array:
        *rows, depth = weight.shape
        scales = np.empty((*rows, -(-depth // self.group)), np.float32)
        by_row = scales.reshape(-1, scales.shape[-1])
        for (some, columns), part in _groups(weight, self.group):
            index = columns.start // self.group
            by_row[some, index : index + 1] = self.scale_of(part)
        for factor in row_scale:
            scales *= factor
        return scales


@dataclass(frozen=True)
class SearchedCodes:
    """Codes of a table [N, K] in a format of 4 or 6 bits, rounded to nearest with searched scales:
    u4 of plugins/iq4.py, or int8 of plugins/six_bits.py."""

    to: SiteFormat

    def __call__(self, weight: Array) -> Array:
        codes = np.empty(weight.shape, NUMPY_DTYPES["u4" if self.to.weight == "iq4" else "i8"])
        for rows in _slices(weight):
            codes[rows] = _searched(weight[rows], self.to)[0]
        return codes


@dataclass(frozen=True)
class SearchedScales:
    """The scales [N, K / group_size] f32 of SearchedCodes, in 8 or 16 bits."""

    to: SiteFormat

    def __call__(self, weight: Array) -> Array:
        return np.concatenate([_searched(weight[rows], self.to)[1] for rows in _slices(weight)])


def _searched(weight: Array, to: SiteFormat) -> tuple[Array, Array]:
    # PyTorch takes a second to import, and most builds round no table to so few bits.
    from trtc.quant.table_rounding import searched_table

    return searched_table(weight, to)


def _groups(weight: Array, group: int) -> Iterator[tuple[tuple[slice, slice], Array]]:
    """Each group of K of some rows, as (place in [rows, K], its values [rows, group] in f32)."""
    by_row = weight.reshape(-1, weight.shape[-1])
    for rows in _slices(by_row):
        for first in range(0, by_row.shape[1], group):
            columns = slice(first, min(first + group, by_row.shape[1]))
            yield (rows, columns), by_row[rows, columns].astype(np.float32)


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
