"""attention_combine in one launch, for TensorRT's plugins.

A program computes some heads of a row. It loads all splits of a head at once, without a loop over
them. Rows without splits are copied.
"""

from collections.abc import Mapping

import triton
import triton.language as tl

from trtc.plugins.attention.split_kv import TENSORRT
from trtc.plugins.attention.tensorrt_tiles import DECODE
from trtc.plugins.attention.triton import padded_head, splits_of
from trtc.plugins.gpu.sources import KernelParameter, KernelSource

_PREFILL_HEADS = 8
"""Heads of a program where most rows are only copied."""


@triton.jit
def attention_combine(
    rows,
    partial,
    stats,
    query_start,
    context_lens,
    num_sequences,
    out,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLIT_ALIGNMENT: tl.constexpr,
):
    row = tl.program_id(0)
    first_head = tl.program_id(1) * HEADS
    d = tl.arange(0, HEAD_PAD)
    in_head = d < HEAD_DIM
    sequence = _sequence_of(row, query_start, num_sequences)
    num_new = tl.load(query_start + sequence + 1) - tl.load(query_start + sequence)
    context = tl.load(context_lens + sequence)
    _, _, num_splits = splits_of(context, WINDOW, CHUNKED, SPLITS, SPLIT_KEYS, SPLIT_ALIGNMENT)
    at = (tl.cast(row, tl.int64) * NUM_HEADS + first_head) * HEAD_DIM
    if (num_new != 1) | (num_splits == 1):
        head = tl.arange(0, HEADS)
        offsets = at + head[:, None] * HEAD_DIM + d[None, :]
        inside = (first_head + head < NUM_HEADS)[:, None] & in_head[None, :]
        tl.store(out + offsets, tl.load(rows + offsets, mask=inside), mask=inside)
    else:
        split = tl.arange(0, SPLITS_PAD)
        live = split < num_splits
        for number in range(tl.minimum(HEADS, NUM_HEADS - first_head)):
            place = (tl.cast(sequence, tl.int64) * SPLITS + split) * NUM_HEADS + first_head + number
            largest = tl.load(stats + 2 * place, mask=live, other=float("-inf"))
            totals = tl.load(stats + 2 * place + 1, mask=live, other=0.0)
            sums = tl.load(
                partial + place[:, None] * HEAD_DIM + d[None, :],
                mask=live[:, None] & in_head[None, :],
                other=0.0,
            )
            factors = tl.exp2(largest - tl.max(largest, 0))
            result = tl.sum(sums * factors[:, None], 0) / tl.sum(totals * factors, 0)
            target = out + at + number * HEAD_DIM + d
            tl.store(target, result.to(out.dtype.element_ty), mask=in_head)


@triton.jit
def _sequence_of(row, query_start, num_sequences):
    """The sequence that a row belongs to: the last that begins at it or before, since those
    without rows begin where the next one does."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= row:
            low = middle
        else:
            high = middle
    return low


def kernel(
    dtypes: Mapping[str, str],
    attributes: Mapping[str, int | float | str],
    page_size: int,
    tactic: int,
) -> KernelSource:
    """The kernel of one node. Grid: (T, num_heads / heads, 1); see `heads`.

    Args:
        dtypes: element type of `rows`.
        attributes: of the operator, complete.
        tactic: DECODE or PREFILL; both are right for every batch.
    """
    num_heads, head_dim = int(attributes["num_heads"]), int(attributes["head_dim"])
    splits = int(attributes["splits"])
    return KernelSource(
        function=attention_combine,
        parameters=(
            KernelParameter("rows", dtypes["rows"]),
            KernelParameter("partial", "f32"),
            KernelParameter("stats", "f32"),
            KernelParameter("query_start", "i32"),
            KernelParameter("context_lens", "i32"),
            KernelParameter("num_sequences", "i32", is_pointer=False),
            KernelParameter("out", dtypes["rows"]),
        ),
        constants={
            "NUM_HEADS": num_heads,
            "HEADS": 1 if tactic == DECODE else _PREFILL_HEADS,
            "HEAD_DIM": head_dim,
            "HEAD_PAD": padded_head(head_dim),
            "WINDOW": int(attributes["window"]),
            "CHUNKED": bool(attributes["chunked"]),
            "SPLITS": splits,
            "SPLITS_PAD": triton.next_power_of_2(splits),
            "SPLIT_KEYS": TENSORRT.keys,
            "SPLIT_ALIGNMENT": TENSORRT.alignment,
        },
        num_warps=4,
        num_stages=1,
    )


def heads(source: KernelSource) -> int:
    """Heads of a row that one program takes."""
    return int(source.constants["HEADS"])
