"""The selective scan of Mamba (Gu and Dao 2023, arXiv:2312.00752), by tokens."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.activations import activate
from trtc.plugins.kv_pool import Rows, step_rows
from trtc.plugins.rounding import cast

Array = NDArray[np.generic]
Floats = NDArray[np.float32]


def reference(
    x: Array,
    z: Array,
    dt: Array,
    b: Array,
    c: Array,
    state: Floats,
    query_start: Array,
    context_lens: Array,
    page_table: Array,
    slots: Array,
    rate: Floats,
    dt_bias: Floats,
    skip: Floats,
    *,
    channels: int,
    state_size: int,
    page_size: int,
) -> tuple[Array, Array]:
    """Return (the channels, a copy of `state` with what the step's tokens left).

    With B and C [state_size] that a row's channels share, and a state S [state_size, channels]:

        step = softplus(dt + dt_bias)
        S = exp(rate * step) * S + outer(B, step * x)
        out = (C @ S + skip * x) * silu(z)

    `state` [num_pages, 1, state_size * channels]; for where a sequence finds and leaves it see
    `step_rows`.
    """
    values, keys, queries = (one.astype(np.float32) for one in (x, b, c))
    step = np.logaddexp(0, dt.astype(np.float32) + dt_bias).astype(np.float32)
    shape = (state_size, channels)
    found, written = np.zeros_like(values), state.copy()
    rows = Rows(query_start, context_lens, page_table, slots)
    for row, before, after in step_rows(rows, page_size):
        matrix = np.outer(keys[row], step[row] * values[row])
        if before is not None:
            matrix += written[before].reshape(shape) * np.exp(rate * step[row])
        found[row] = queries[row] @ matrix + skip * values[row]
        written[after] = matrix.reshape(state.shape[1:])
    out = found * activate(z.astype(np.float32), "silu")
    return cast(out, str(x.dtype)), written
