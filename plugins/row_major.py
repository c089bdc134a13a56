"""What weights are before they are stored in the order of a kernel, for the references."""

from typing import Any

from numpy.typing import NDArray

from trtc.plugins.compact import unpack_compact, unpack_compact_experts
from trtc.plugins.layouts import unpack, unpack_columns, unpack_experts, unpack_planes
from trtc.plugins.six_bits import join
from trtc.plugins.tiles import CHANNELS, untile

Array = NDArray[Any]


def row_major(stored: Array, shape: tuple[int, ...], dtype: str, layout: str) -> Array:
    """The weight of this shape, [N, K] or [E, N, K], that an operator has in a layout.

    Args:
        dtype: the operator's weight_dtype.
    """
    *experts, columns, depth = shape
    match layout:
        case "packed" if experts:
            return unpack_experts(stored, experts[0], columns, depth, dtype)
        case "packed":
            return unpack(stored, columns, depth, dtype)
        case "compact" if experts:
            return unpack_compact_experts(stored, experts[0], columns, depth)
        case "compact":
            return unpack_compact(stored, columns, depth)
        case "planes":
            return unpack_planes(stored, columns, depth)
        case "split":
            return join(stored, *shape)
        case "tiles":
            return untile(stored, CHANNELS)
    return stored


def row_major_groups(stored: Array | None, layout: str) -> Array | None:
    """Scales or zero points [..., N, G] of such a weight; None: there are none."""
    if stored is None:
        return None
    match layout:
        case "packed" | "planes":
            return unpack_columns(stored)
        case "tiles":
            return untile(stored, 1)
    return stored
