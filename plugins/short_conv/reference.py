"""The short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404), one token at a time."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.kv_pool import Rows, step_rows
from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(
    gated: Array,
    state: Array,
    query_start: Array,
    context_lens: Array,
    page_table: Array,
    slots: Array,
    weight: Array,
    bias: Array | None,
    *,
    page_size: int,
) -> tuple[Array, Array]:
    """Return (c * (conv(b * x) + bias), a copy of `state` with what the step's tokens left).

    `state` [num_pages, columns, channels]: a page has the last inputs of the convolution, oldest
    first, as they were after some token of a sequence. For where a sequence finds and leaves it see
    `step_rows`.
    """
    through = str(gated.dtype)
    b, c, x = np.split(gated.astype(np.float32), 3, axis=1)
    inputs = cast(b * x, through).astype(np.float32)
    taps = weight.astype(np.float32)
    out, written = np.zeros_like(inputs), state.copy()
    rows = Rows(query_start, context_lens, page_table, slots)
    for row, before, after in step_rows(rows, page_size):
        columns = np.zeros(state.shape[1:], np.float32)
        if before is not None:
            columns = written[before].astype(np.float32)
        seen = np.concatenate((columns, inputs[row : row + 1]))
        total = np.sum(seen * taps, axis=0) + (0 if bias is None else bias)
        out[row] = c[row] * cast(total, through).astype(np.float32)
        written[after] = cast(seen[1:], str(state.dtype))
    return cast(out, through), written
