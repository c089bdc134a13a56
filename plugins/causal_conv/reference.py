"""The convolution before a gated delta net (Yang et al. 2024, arXiv:2412.06464) and before the
recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), by tokens."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.activations import activate
from trtc.plugins.kv_pool import Rows, step_rows
from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(
    x: Array,
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
    """Return (silu(conv(x) + bias), a copy of `state` with what the step's tokens left).

    `state` [num_pages, columns, channels] holds the last inputs, oldest first; for where a sequence
    finds and leaves it see `step_rows`.
    """
    inputs, taps = x.astype(np.float32), weight.astype(np.float32)
    out, written = np.zeros_like(inputs), state.copy()
    rows = Rows(query_start, context_lens, page_table, slots)
    for row, before, after in step_rows(rows, page_size):
        columns = np.zeros(state.shape[1:], np.float32)
        if before is not None:
            columns = written[before].astype(np.float32)
        seen = np.concatenate((columns, inputs[row : row + 1]))
        total = np.sum(seen * taps, axis=0)
        out[row] = activate(total if bias is None else total + bias, "silu")
        written[after] = cast(seen[1:], str(state.dtype))
    return cast(out, str(x.dtype)), written
