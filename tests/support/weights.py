"""Random quantised weights whose products are of the order of one."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.kernels import KernelCall
from trtc.plugins.compact import pack_compact
from trtc.plugins.layouts import MOST_IN_PLANES, pack, pack_columns, pack_planes
from trtc.plugins.rounding import NUMPY_DTYPES, cast
from trtc.plugins.six_bits import split
from trtc.plugins.tiles import CHANNELS, tile

Array = NDArray[Any]

_NIBBLES = ("i4", "u4", "f4e2m1")
_LIMITS = {"i8": 128, "i6": 32, "i4": 8, "u4": 16, "iq4": 70}


def random_weight(rng: np.random.Generator, *shape: int, dtype: str) -> Array:
    """Normal values for floats, uniform codes over the whole range for integers."""
    if dtype == "iq4":
        return rng.integers(0, 16, shape).astype(NUMPY_DTYPES["u4"])
    if dtype in _LIMITS:
        low = 0 if dtype == "u4" else -_LIMITS[dtype]
        high = 16 if dtype == "u4" else _LIMITS[dtype]
        return rng.integers(low, high, shape).astype(NUMPY_DTYPES["i8" if dtype == "i6" else dtype])
    spread = 2 if dtype == "f4e2m1" else 1
    return cast(spread * rng.standard_normal(shape).astype(np.float32), dtype)


def random_scales(
    rng: np.random.Generator, *columns: int, depth: int, group: int, dtype: str, x_dtype: str
) -> Array:
    """[columns..., G] scales that undo the size of the codes and of a sum over `depth`.

    Those of groups of 4 and 6 bits have either sign, as calibration gives them: -8 reaches further
    than 7.
    """
    groups = -(-depth // group) if group else 1
    size = _LIMITS.get(dtype, 1) * _LIMITS.get(x_dtype, 1) * depth**0.5
    scales: Array = rng.uniform(0.5, 1.5, (*columns, groups)) / size
    if group and dtype in ("i6", "i4", "u4", "iq4"):
        scales *= rng.choice([-1, 1], scales.shape)
    return scales.astype(np.float32)


def stored(weight: Array, dtype: str, layout: str) -> Array:
    if layout == "tiles":
        return tile(weight, CHANNELS)
    if layout == "compact":
        return pack_compact(weight)
    if layout == "split":
        return split(weight)
    if layout == "planes":
        return pack_planes(np.clip(weight, -MOST_IN_PLANES, MOST_IN_PLANES))
    return pack(weight, dtype) if layout == "packed" else weight


def stored_groups(values: Array, layout: str) -> Array:
    """Scales or zero points [..., N, G] as they lie beside a weight that is `stored`."""
    if layout in ("packed", "planes"):
        return pack_columns(values)
    return tile(values, 1) if layout == "tiles" else values


def in_memory(call: KernelCall) -> KernelCall:
    """The call with row-major 4-bit weights as kernels get them: two a byte, the first low."""
    narrow = {
        name: array
        for name, array in call.inputs.items()
        if array is not None and array.dtype in [NUMPY_DTYPES[name] for name in _NIBBLES]
    }
    nibbles = {
        name: (array if array.dtype == NUMPY_DTYPES["f4e2m1"] else array.astype(np.int8)).view(
            np.uint8
        )
        & 15
        for name, array in narrow.items()
    }
    packed = {name: codes[..., 0::2] | (codes[..., 1::2] << 4) for name, codes in nibbles.items()}
    shapes = {name: array.shape for name, array in narrow.items()}
    dtypes = {
        name: dtype
        for name, array in narrow.items()
        for dtype in _NIBBLES
        if array.dtype == NUMPY_DTYPES[dtype]
    }
    return replace(
        call,
        inputs={**call.inputs, **packed},
        shapes={**call.shapes, **shapes},
        dtypes={**call.dtypes, **dtypes},
    )
