"""paged_attention in one launch, for TensorRT's plugins: ragged prefill chunks and decodes over a
paged pool, in the tiles of plugins/attention/triton.py, with scales that are always given.
"""

from collections.abc import Mapping

import triton
import triton.language as tl

from trtc.plugins.attention.tensorrt_tiles import attention_source
from trtc.plugins.attention.triton import attend, find_sequence
from trtc.plugins.gpu.sources import KernelSource


@triton.jit
def paged_attention(
    q,
    pool,
    query_start,
    context_lens,
    page_table,
    k_scale,
    v_scale,
    num_sequences,
    table_width,
    out,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STORED: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PAD
    kv_head = tl.program_id(1)
    sequence, first_new = find_sequence(tl.program_id(0), query_start, num_sequences, BLOCK_Q)
    first_row = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - first_row
    if first_new < num_new:
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, HEAD_PAD)
        new = first_new + m // GROUP_PAD
        head = m % GROUP_PAD
        row = (first_row + new).to(tl.int64)
        at = (row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + head) * HEAD_DIM
        offsets = at[:, None] + d[None, :]
        inside = ((new < num_new) & (head < GROUP))[:, None] & (d < HEAD_DIM)[None, :]
        before = tl.load(context_lens + sequence) - num_new
        result = attend(
            tl.load(q + offsets, mask=inside, other=0.0),
            before + new,
            before + first_new,
            before + tl.minimum(first_new + BLOCK_Q, num_new),
            pool,
            page_table + tl.cast(sequence, tl.int64) * table_width,
            kv_head,
            SCALE * tl.load(k_scale),
            None,
            NUM_KV_HEADS,
            HEAD_DIM,
            STORED,
            PAGE_SIZE,
            BLOCK_N,
            WINDOW,
            CHUNKED,
            SOFTCAP,
            PRECISION,
        )
        result = result * tl.load(v_scale)
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)


def kernel(
    dtypes: Mapping[str, str],
    attributes: Mapping[str, int | float | str],
    page_size: int,
    tactic: int,
) -> KernelSource:
    """The kernel of one node. Grid: (T // block_q + B, num_kv_heads, 1); see `block_q`.

    Args:
        dtypes: element types of `q` and `pool`.
        attributes: of the operator, complete.
        tactic: DECODE or PREFILL; both are right for every batch.
    """
    return attention_source(paged_attention, dtypes, attributes, page_size, tactic)
