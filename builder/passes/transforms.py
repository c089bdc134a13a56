"""Pure functions of weights that passes put into recipes.

They are frozen records, not closures: two equal transforms of equal sources are one weight, and
passes can see that.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.layouts import pack, pack_columns
from trtc.plugins.rounding import cast

Array = NDArray[Any]


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

    def __call__(self, weight: Array) -> Array:
        return pack(weight, self.dtype)


@dataclass(frozen=True)
class PackColumns:
    """Scales or zero points [N, G], or [E, N, G], of a packed weight."""

    def __call__(self, values: Array) -> Array:
        return pack_columns(values)
