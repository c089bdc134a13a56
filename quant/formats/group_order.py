"""Groups whose input channels are scattered over a weight's columns, as g_idx says."""

import numpy as np

from trtc.protos.errors import CheckpointError
from trtc.quant.formats.stored import Array


def order_of_groups(g_idx: Array, *, name: str, group_size: int) -> Array:
    """[K] i32: the columns of all groups, one group after the other, each in its own order.

    Args:
        g_idx: [K], the group of each column.
        name: of its tensor, for errors.

    Raises:
        CheckpointError: a group that does not exist, or one of other than `group_size` columns.
    """
    num_groups = len(g_idx) // group_size
    outside = g_idx[(g_idx < 0) | (g_idx >= num_groups)]
    if outside.size:
        raise CheckpointError(
            f"names group {outside[0]}, and the scales are of {num_groups}",
            field=name,
            remedy="Download or export the checkpoint again",
        )
    sizes = np.bincount(g_idx, minlength=num_groups)
    wrong = np.flatnonzero(sizes != group_size)
    if wrong.size:
        raise CheckpointError(
            f"gives group {wrong[0]} {sizes[wrong[0]]} columns, and group_size is {group_size}",
            field=name,
            remedy='Check "group_size" in quantization_config, or export the checkpoint again',
        )
    return np.argsort(g_idx, kind="stable").astype(np.int32)
