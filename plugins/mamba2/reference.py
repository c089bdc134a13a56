"""The recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), by tokens."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.activations import activate
from trtc.plugins.kv_pool import Rows, step_rows
from trtc.plugins.rounding import cast

Array = NDArray[np.generic]
Floats = NDArray[np.float32]


def reference(
    xbc: Array,
    z: Array,
    dt: Array,
    state: Floats,
    query_start: Array,
    context_lens: Array,
    page_table: Array,
    slots: Array,
    rate: Floats,
    dt_bias: Floats,
    skip: Floats,
    norm: Floats | None,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state_size: int,
    dt_min: float,
    dt_max: float,
    eps: float,
    page_size: int,
) -> tuple[Array, Array, Floats | None]:
    """Return (the heads side by side, a copy of `state` with what the step's tokens left, the sum
    of the squares of each group if there is no norm).

    Of each head, with x [head_dim] of its own, B and C [state_size] of its group, and a state
    S [state_size, head_dim]:

        step = clip(softplus(dt + dt_bias), dt_min, dt_max)
        S = exp(rate * step) * S + outer(B, step * x)
        y = C @ S + skip * x

    and of each group of heads, gated = y * silu(z); out = rms_norm(gated) * norm. Without a norm
    out = gated.

    `state` [num_pages, heads, state_size * head_dim]; for where a sequence finds and leaves it see
    `step_rows`.
    """
    width, shared = heads * head_dim, groups * state_size
    x, b, c = np.split(xbc.astype(np.float32), [width, width + shared], axis=1)
    x = x.reshape(-1, heads, head_dim)
    b, c = (
        np.repeat(one.reshape(-1, groups, state_size), heads // groups, axis=1) for one in (b, c)
    )
    step = np.logaddexp(0, dt.astype(np.float32) + dt_bias).astype(np.float32)
    step = np.clip(step, dt_min, dt_max or None)
    decay = np.exp(rate * step)
    shape = (heads, state_size, head_dim)
    found, written = np.zeros_like(x), state.copy()
    rows = Rows(query_start, context_lens, page_table, slots)
    for row, before, after in step_rows(rows, page_size):
        matrix = np.zeros(shape, np.float32)
        if before is not None:
            matrix = written[before].reshape(shape) * decay[row, :, None, None]
        matrix = matrix + b[row, :, :, None] * (step[row, :, None] * x[row])[:, None, :]
        found[row] = np.einsum("hn,hnp->hp", c[row], matrix) + skip[:, None] * x[row]
        written[after] = matrix.reshape(state.shape[1:])
    gated = found.reshape(z.shape) * activate(z.astype(np.float32), "silu")
    grouped = gated.reshape(-1, groups, width // groups)
    through = str(xbc.dtype)
    if norm is None:
        return cast(gated, through), written, np.sum(grouped**2, axis=-1)
    mean = np.mean(grouped**2, axis=-1, keepdims=True)
    normed = (grouped / np.sqrt(mean + np.float32(eps))).reshape(z.shape) * norm
    return cast(normed, through), written, None
