"""The short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404), one token at a time."""

import numpy as np
from numpy.typing import NDArray

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
    first, as they were after some token of a sequence. A sequence goes on from the page that its
    table has for the token before its first new one. What each token leaves goes to the page of its
    slot, where that of the next one may replace it.

    A sequence of one token may go on from what the row before it leaves in this step: a draft.
    """
    through = str(gated.dtype)
    b, c, x = np.split(gated.astype(np.float32), 3, axis=1)
    inputs = cast(b * x, through).astype(np.float32)
    taps = weight.astype(np.float32)
    out, written = np.zeros_like(inputs), state.copy()
    for sequence, length in enumerate(int(n) for n in context_lens):
        begin, end = int(query_start[sequence]), int(query_start[sequence + 1])
        pages, start = page_table[sequence], length - (end - begin)
        columns = np.zeros(state.shape[1:], np.float32)
        if start > 0:
            columns = written[pages[(start - 1) // page_size]].astype(np.float32)
        for row in range(begin, end):
            seen = np.concatenate((columns, inputs[row : row + 1]))
            total = np.sum(seen * taps, axis=0) + (0 if bias is None else bias)
            out[row] = c[row] * cast(total, through).astype(np.float32)
            columns = seen[1:]
            written[slots[row] // page_size] = cast(columns, str(state.dtype))
    return cast(out, through), written
