"""Batched matrix product with one matrix per head."""

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import cast

Array = NDArray[np.generic]


def reference(x: Array, weight: Array, *, in_dim: int, out_dim: int) -> tuple[Array]:
    """Return (weight[h] @ x[:, h, :K], followed by x[:, h, K:] as it is).

    Shapes: x [M, heads * in_dim], weight [heads, N, K], out [M, heads * out_dim].
    """
    num_heads, n, k = weight.shape
    assert in_dim - k == out_dim - n
    heads = x.reshape(-1, num_heads, in_dim)
    product = np.einsum(
        "mhk,hnk->mhn", heads[..., :k].astype(np.float32), weight.astype(np.float32)
    )
    out = np.concatenate((cast(product, str(x.dtype)), heads[..., k:]), axis=-1)
    return (out.reshape(x.shape[0], num_heads * out_dim),)
