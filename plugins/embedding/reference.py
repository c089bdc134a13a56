"""Table lookup, and Gemma's scale."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.layouts import unpack, unpack_columns, unpack_planes
from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(
    token_ids: Array,
    table: Array,
    table_scale: Array | None,
    *,
    scale: float,
    group_size: int,
    layout: str,
    out_dtype: str,
) -> tuple[Array]:
    """Return (table * table_scale)[token_ids] * scale; rows and scale are first rounded to
    `out_dtype`."""
    if layout != "row_major":
        assert table_scale is not None
        table_scale = unpack_columns(table_scale)
        num_rows, width = table.shape
        if layout == "planes":
            table = unpack_planes(table, num_rows, width)
        else:
            table = unpack(table, num_rows, width, "i8")
    values = table[token_ids].astype(np.float32)
    if table_scale is not None:
        scales = np.repeat(table_scale[token_ids], group_size, axis=1)[:, : table.shape[1]]
        values = values * scales.astype(np.float32)
    rows = cast(values, out_dtype).astype(np.float32)
    rounded_scale = cast(np.asarray(scale, np.float32), out_dtype).astype(np.float32)
    return (cast(rows * rounded_scale, out_dtype),)
