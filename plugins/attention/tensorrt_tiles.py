"""Attention that TensorRT's plugins launch once a node: tiles of triton.py by tactic, and what the
kernels of paged_attention and attention_split both take.
"""

from collections.abc import Mapping
from typing import Any

from trtc.plugins.attention.triton import Tile, padded_head, tile_constants
from trtc.plugins.gpu.sources import KernelParameter, KernelSource
from trtc.plugins.gpu.triton_launch import power_of_two

DECODE, PREFILL = 1, 2
"""Tactics: few rows a sequence, or many."""
TACTICS = (DECODE, PREFILL)


def attention_source(
    function: Any,
    dtypes: Mapping[str, str],
    attributes: Mapping[str, int | float | str],
    page_size: int,
    tactic: int,
    *,
    partial_results: tuple[KernelParameter, ...] = (),
    constants: Mapping[str, int] | None = None,
) -> KernelSource:
    """A specialisation of a kernel whose parameters are paged_attention's, with scales that are
    always given.

    Args:
        dtypes: element types of `q` and `pool`.
        attributes: of the operator, complete.
        tactic: DECODE or PREFILL.
        partial_results: outputs of the function after `out`.
        constants: of the function, beside those of its tiles.
    """
    head_dim, num_kv_heads = int(attributes["head_dim"]), int(attributes["num_kv_heads"])
    group = int(attributes["num_heads"]) // num_kv_heads
    tile = tile_of(dtypes, head_dim, group, tactic)
    return KernelSource(
        function=function,
        parameters=(
            KernelParameter("q", dtypes["q"]),
            KernelParameter("pool", dtypes["pool"]),
            KernelParameter("query_start", "i32"),
            KernelParameter("context_lens", "i32"),
            KernelParameter("page_table", "i32"),
            KernelParameter("k_scale", "f32"),
            KernelParameter("v_scale", "f32"),
            KernelParameter("num_sequences", "i32", is_pointer=False),
            KernelParameter("table_width", "i32", is_pointer=False),
            KernelParameter("out", dtypes["q"]),
            *partial_results,
        ),
        constants={
            **tile_constants(
                attributes,
                head_dim=head_dim,
                stored_width=head_dim,
                num_kv_heads=num_kv_heads,
                page_size=page_size,
                tile=tile,
            ),
            "PRECISION": "ieee",
            **(constants or {}),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def tile_of(dtypes: Mapping[str, str], head_dim: int, group: int, tactic: int) -> Tile:
    """The tile of a tactic, small enough for the shared memory of every SM.

    Args:
        dtypes: element type of `q`.
        group: query heads of a KV head.
    """
    head_pad = padded_head(head_dim)
    group_pad = power_of_two(group)
    if dtypes["q"] == "f32":
        block_m = 16 if tactic == DECODE or head_pad > 128 else 32
        return Tile(max(block_m, group_pad), 16, num_warps=4, num_stages=1)
    block_m = 16 if tactic == DECODE else 64 if head_pad <= 128 else 32
    stages = 2 if head_pad <= (128 if tactic == DECODE else 64) else 1
    block_n = 64 if head_pad <= 64 else 32
    return Tile(max(block_m, group_pad), block_n, num_warps=4, num_stages=stages)


def block_q(source: KernelSource) -> int:
    """New tokens of a sequence that one program takes."""
    return int(source.constants["BLOCK_M"]) // int(source.constants["GROUP_PAD"])
