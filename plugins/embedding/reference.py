"""Table lookup, and Gemma's scale."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.iq4 import scales_of, values_of
from trtc.plugins.layouts import unpack, unpack_columns, unpack_planes
from trtc.plugins.rounding import NUMPY_DTYPES, cast
from trtc.plugins.tiles import CHANNELS, untile

Array = NDArray[np.generic]


def reference(
    token_ids: Array,
    table: Array,
    table_scale: Array | None,
    scale_unit: Array | None,
    *,
    scale: float,
    group_size: int,
    layout: str,
    out_dtype: str,
) -> tuple[Array]:
    """Return (table * table_scale)[token_ids] * scale; rows and scale are first rounded to
    `out_dtype`."""
    is_iq4 = table.dtype == NUMPY_DTYPES["u4"]
    num_rows, width = table.shape
    if layout == "planes":
        table = unpack_planes(table, num_rows, width)
    elif layout == "packed":
        table = unpack(table, num_rows, width, "iq4" if is_iq4 else "i8")
    elif layout == "tiles":
        table = untile(table, CHANNELS)
    if table_scale is not None and layout != "row_major":
        table_scale = untile(table_scale, 1) if layout == "tiles" else unpack_columns(table_scale)
    values = (values_of(table[token_ids]) if is_iq4 else table[token_ids]).astype(np.float32)
    if table_scale is not None:
        if scale_unit is not None:
            table_scale = scales_of(table_scale, scale_unit[:, None])
        scales = np.repeat(table_scale[token_ids], group_size, axis=1)[:, : table.shape[1]]
        values = values * scales.astype(np.float32)
    rows = cast(values, out_dtype).astype(np.float32)
    rounded_scale = cast(np.asarray(scale, np.float32), out_dtype).astype(np.float32)
    return (cast(rows * rounded_scale, out_dtype),)
