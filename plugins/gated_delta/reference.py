"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) as Qwen3-Next and, with a decay of each
key channel, Kimi-Linear (arXiv:2510.26692) have it, by tokens."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.activations import activate
from trtc.plugins.kv_pool import Rows, step_rows
from trtc.plugins.rounding import quantize

Array = NDArray[np.generic]
Floats = NDArray[np.float32]
_EPS = 1e-6
"""Of the norm of q and k."""


def reference(
    qkv: Array,
    z: Array,
    b: Array,
    a: Array,
    state: Floats,
    query_start: Array,
    context_lens: Array,
    page_table: Array,
    slots: Array,
    rate: Floats,
    dt_bias: Floats,
    norm: Floats,
    pre_scale: Floats | None,
    out_scale: Floats | None,
    *,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    decays: int,
    write_scale: float,
    gate: str,
    eps: float,
    page_size: int,
    out_dtype: str,
) -> tuple[Array, Array]:
    """Return (the heads side by side, quantised as plugins/rounding.py says, a copy of `state` with
    what the step's tokens left).

    Of each value head, with q and k of unit length, those of the key head that it shares, and a
    state S [key_dim, value_dim]:

        S = exp(rate * softplus(a + dt_bias)) * S
        S = S + outer(k, write_scale * sigmoid(b) * (v - k @ S))
        out = rms_norm(q @ S / sqrt(key_dim)) * norm * gate(z)

    A head has one number of `a` and `dt_bias`, which decays all of S, or `decays` = key_dim of
    them, one for each row of S.

    `state` [num_pages, value_heads, key_dim * value_dim]; for where a sequence finds and leaves it
    see `step_rows`.
    """
    width, through = key_heads * key_dim, str(qkv.dtype)
    q, k, v = np.split(qkv.astype(np.float32), [width, 2 * width], axis=1)
    q, k = (_unit(one.reshape(-1, key_heads, key_dim)) for one in (q, k))
    q, k = (np.repeat(one, value_heads // key_heads, axis=1) for one in (q, k))
    v = v.reshape(-1, value_heads, value_dim)
    beta = np.float32(write_scale) * _sigmoid(b.astype(np.float32))
    steps = np.logaddexp(0, a.astype(np.float32) + dt_bias).reshape(-1, value_heads, decays)
    decay = np.exp(rate[:, None] * steps).astype(np.float32)
    shape = (value_heads, key_dim, value_dim)
    found, written = np.zeros_like(v), state.copy()
    rows = Rows(query_start, context_lens, page_table, slots)
    for row, before, after in step_rows(rows, page_size):
        matrix = np.zeros(shape, np.float32)
        if before is not None:
            matrix = written[before].reshape(shape) * decay[row, :, :, None]
        known = np.einsum("hk,hkv->hv", k[row], matrix)
        new = beta[row, :, None] * (v[row] - known)
        matrix = matrix + k[row, :, :, None] * new[:, None, :]
        found[row] = np.einsum("hk,hkv->hv", q[row], matrix) / np.sqrt(np.float32(key_dim))
        written[after] = matrix.reshape(state.shape[1:])
    mean = np.mean(found**2, axis=-1, keepdims=True)
    normed = found / np.sqrt(mean + np.float32(eps)) * norm
    out = normed.reshape(z.shape) * activate(z.astype(np.float32), gate)
    return quantize(out, pre_scale, out_scale, out_dtype, through=through), written


def _unit(x: Floats) -> Floats:
    squares = np.sum(x**2, axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(squares + np.float32(_EPS)), np.float32)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(np.exp(-np.logaddexp(0, -x)), np.float32)
