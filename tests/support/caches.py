"""Layouts of a model's cache, and pools of them as the graph sees them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.kv import CacheLayout, Full, Group, KvDType, attention_entry

Array = NDArray[Any]


def uniform_layout(
    *, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: KvDType
) -> CacheLayout:
    """One group of alike layers that keep every token."""
    entries = tuple(
        attention_entry(layer, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
        for layer in range(num_layers)
    )
    groups = (Group(kind=Full(), entries=entries),) if entries else ()
    return CacheLayout(page_size=page_size, groups=groups)


def new_pools(kv: CacheLayout, num_pages: int, value: float = 0.0) -> dict[str, Array]:
    """Graph input -> a pool full of `value`."""
    return {
        place.name: np.full((num_pages, *kv.pool_shape(place)[1:]), value, dtype=np.float32).astype(
            NUMPY_DTYPES[place.entry.element]
        )
        for place in kv.places
    }


def outputs_as_inputs(pools: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, Array]:
    """The pools as a step left them, for the next one."""
    return {name: outputs[f"{name}_out"] for name in pools}


def kv_heads(kv: CacheLayout) -> set[int]:
    return {plane.heads for place in kv.places for plane in place.entry.planes}
