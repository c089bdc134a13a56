"""attention_split in one launch, for TensorRT's plugins.

A program is a tile of plugins/attention/triton.py and a split of its context. Tiles of
sequences with more than one new token, and of short contexts, have one split: their results are
bitwise those of paged_attention's kernel. Programs of splits beyond a context's end at once.
"""

from collections.abc import Mapping

import triton
import triton.language as tl

from trtc.plugins.attention.split_kv import TENSORRT
from trtc.plugins.attention.tensorrt_tiles import attention_source
from trtc.plugins.attention.triton import attend_keys, find_sequence, first_key, splits_of
from trtc.plugins.gpu.sources import KernelParameter, KernelSource


@triton.jit
def attention_split(
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
    partial,
    stats,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STORED: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLIT_ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PAD
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    split = tl.program_id(1) // NUM_KV_HEADS
    sequence, first_new = find_sequence(tl.program_id(0), query_start, num_sequences, BLOCK_Q)
    first_row = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - first_row
    context = tl.load(context_lens + sequence)
    first, length, num_splits = splits_of(
        context, WINDOW, CHUNKED, SPLITS, SPLIT_KEYS, SPLIT_ALIGNMENT
    )
    num_splits = tl.where(num_new == 1, num_splits, 1)
    if (first_new < num_new) & (split < num_splits):
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, HEAD_PAD)
        new = first_new + m // GROUP_PAD
        head = kv_head * GROUP + m % GROUP_PAD
        is_row = (new < num_new) & (m % GROUP_PAD < GROUP)
        inside = is_row[:, None] & (d < HEAD_DIM)[None, :]
        at = (first_row + new).to(tl.int64) * NUM_HEADS + head
        offsets = at[:, None] * HEAD_DIM + d[None, :]
        before = context - num_new
        first_position = before + first_new
        is_whole = num_splits == 1
        whole_end = before + tl.minimum(first_new + BLOCK_Q, num_new)
        split_begin = first + split * length
        begin = tl.where(is_whole, first_key(first_position, WINDOW, CHUNKED, BLOCK_N), split_begin)
        end = tl.where(is_whole, whole_end, tl.minimum(split_begin + length, context))
        largest, total, weighted = attend_keys(
            tl.load(q + offsets, mask=inside, other=0.0),
            before + new,
            first_position,
            begin,
            end,
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
        if is_whole:
            result = weighted / total[:, None] * tl.load(v_scale)
            tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)
        else:
            place = (tl.cast(sequence, tl.int64) * SPLITS + split) * NUM_HEADS + head
            sums = partial + place[:, None] * HEAD_DIM + d[None, :]
            tl.store(sums, weighted * tl.load(v_scale), mask=inside)
            tl.store(stats + 2 * place, largest, mask=is_row)
            tl.store(stats + 2 * place + 1, total, mask=is_row)


def kernel(
    dtypes: Mapping[str, str],
    attributes: Mapping[str, int | float | str],
    page_size: int,
    tactic: int,
) -> KernelSource:
    """The kernel of one node. Grid: (T // block_q + B, num_kv_heads * splits, 1), where as many
    splits will do as the longest context of the step has.

    Args:
        dtypes: element types of `q` and `pool`.
        attributes: of the operator, complete.
        tactic: DECODE or PREFILL; both are right for every batch.
    """
    source = attention_source(
        attention_split,
        dtypes,
        attributes,
        page_size,
        tactic,
        partial_results=(KernelParameter("partial", "f32"), KernelParameter("stats", "f32")),
        constants={
            "SPLITS": int(attributes["splits"]),
            "SPLIT_KEYS": TENSORRT.keys,
            "SPLIT_ALIGNMENT": TENSORRT.alignment,
        },
    )
    block_n = int(source.constants["BLOCK_N"])
    assert TENSORRT.alignment % block_n == 0, "a split begins where a block of keys does"
    return source
