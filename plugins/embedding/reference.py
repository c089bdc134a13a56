"""Table lookup, and Gemma's scale."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.iq4 import scales_of, values_of
from trtc.plugins.rounding import cast
from trtc.plugins.row_major import row_major, row_major_groups

Array = NDArray[np.generic]


def reference(
    token_ids: Array,
    table: Array,
    table_scale: Array | None,
    scale_unit: Array | None,
    *,
    V: int,
    H: int,
    weight_dtype: str,
    scale: float,
    group_size: int,
    layout: str,
    out_dtype: str,
) -> tuple[Array]:
    """Return (table * table_scale)[token_ids] * scale; rows and scale are first rounded to
    `out_dtype`."""
    table = row_major(table, (V, H), weight_dtype, layout)
    table_scale = row_major_groups(table_scale, layout)
    rows = values_of(table[token_ids]) if weight_dtype == "iq4" else table[token_ids]
    values = rows.astype(np.float32)
    if table_scale is not None:
        if scale_unit is not None:
            table_scale = scales_of(table_scale, scale_unit[:, None])
        scales = np.repeat(table_scale[token_ids], group_size, axis=1)[:, :H]
        values = values * scales.astype(np.float32)
    rounded = cast(values, out_dtype).astype(np.float32)
    rounded_scale = cast(np.asarray(scale, np.float32), out_dtype).astype(np.float32)
    return (cast(rounded * rounded_scale, out_dtype),)
