"""How select_tokens runs on a GPU: with few rows their keys are shared by programs, with many a
program takes whole rows, one after another."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import ONE, Extent, Grid, Launch, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs
from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.plugins.select_tokens.triton import find_row, score_keys, select_all, select_largest

_ORDER = "order"
"""Scratch buffer, [rows or programs, max_context] i32: scores as numbers in their order."""
_FEW_ROWS = 64
_SPLIT_KEYS = 512
"""Keys that a program scores before it goes on to those behind the other programs'."""
_SPLIT_SHORTEST = 2
"""As many of the splits of plugins/attention/split_kv.py are as long."""
_PROGRAMS = 2
"""For each multiprocessor, of those that take whole rows."""
_MAX_BYTES = 1 << 29
"""Of their scratch buffer."""
_BLOCK = 2048
"""The most scores that are compared at once."""
_LEAST_BLOCK = 128
"""A number for each thread."""


@triton.jit
def score_rows(
    q,
    weights,
    pool,
    query_start,
    context_lens,
    page_table,
    dims,
    order,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    MAX_CONTEXT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Some of the keys of a row, if it sees more than it selects."""
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(dims):
        num_sequences = tl.load(dims + 1)
        sequence, seen = find_row(row, query_start, context_lens, num_sequences, SEQUENCES)
        if seen > TOP_K:
            pages = page_table + tl.cast(sequence, tl.int64) * TABLE_WIDTH
            step = tl.num_programs(1) * SPLIT_KEYS
            for begin in range(tl.program_id(1) * SPLIT_KEYS, seen, step):
                score_keys(
                    q + row * Q_STRIDE, weights + row * WEIGHT_STRIDE, pool, pages, begin,
                    tl.minimum(begin + SPLIT_KEYS, seen), order + row * MAX_CONTEXT,
                    NUM_HEADS, WIDTH, WIDTH_PAD, PAGE_SIZE, HEADS, BLOCK_N,
                )  # fmt: skip


@triton.jit
def select_scored(
    query_start,
    context_lens,
    page_table,
    dims,
    order,
    selected,
    TOP_K: tl.constexpr,
    MAX_CONTEXT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A row whose scores are known."""
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(dims):
        num_sequences = tl.load(dims + 1)
        sequence, seen = find_row(row, query_start, context_lens, num_sequences, SEQUENCES)
        pages = page_table + tl.cast(sequence, tl.int64) * TABLE_WIDTH
        target = selected + row * OUT_STRIDE
        if seen > TOP_K:
            scores = order + row * MAX_CONTEXT
            select_largest(scores, seen, pages, target, TOP_K, PAGE_SIZE, BLOCK)
        else:
            select_all(seen, pages, target, TOP_K, PAGE_SIZE, BLOCK)


@triton.jit
def select_rows(
    q,
    weights,
    pool,
    query_start,
    context_lens,
    page_table,
    dims,
    order,
    selected,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    MAX_CONTEXT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Whole rows, every so many; the last ones, which see the most, come first."""
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    num_tokens = tl.load(dims)
    num_sequences = tl.load(dims + 1)
    scores = order + tl.program_id(0).to(tl.int64) * MAX_CONTEXT
    for number in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        row = (num_tokens - 1 - number).to(tl.int64)
        sequence, seen = find_row(row, query_start, context_lens, num_sequences, SEQUENCES)
        pages = page_table + tl.cast(sequence, tl.int64) * TABLE_WIDTH
        target = selected + row * OUT_STRIDE
        if seen > TOP_K:
            score_keys(
                q + row * Q_STRIDE, weights + row * WEIGHT_STRIDE, pool, pages, 0, seen, scores,
                NUM_HEADS, WIDTH, WIDTH_PAD, PAGE_SIZE, HEADS, BLOCK_N,
            )  # fmt: skip
            # Threads read what others wrote; and after the choice the next row's scores come.
            tl.debug_barrier()
            select_largest(scores, seen, pages, target, TOP_K, PAGE_SIZE, BLOCK)
            tl.debug_barrier()
        else:
            select_all(seen, pages, target, TOP_K, PAGE_SIZE, BLOCK)


def lower(site: Site) -> tuple[Variant, ...]:
    most, row_bytes = site.limits.max_num_tokens, int(site.attributes["max_context"]) * 4
    few = min(most, _FEW_ROWS)
    split = Extent("splits", block=_SPLIT_SHORTEST)
    shared = Variant(
        work=(
            _launch(site, score_rows, (Extent("tokens"), split, ONE)),
            _launch(site, select_scored, (Extent("tokens"), ONE, ONE)),
        ),
        max_rows=few,
        scratch={_ORDER: few * row_bytes},
    )
    if few == most:
        return (shared,)
    programs = min(most, _PROGRAMS * site.arch.multiprocessors, max(1, _MAX_BYTES // row_bytes))
    whole = Variant(
        work=(_launch(site, select_rows, (Extent(times=programs), ONE, ONE)),),
        max_rows=most,
        scratch={_ORDER: programs * row_bytes},
    )
    return (shared, whole)


def _launch(site: Site, function: triton.JITFunction, grid: Grid) -> Launch:
    heads, width = int(site.attributes["num_heads"]), site.axes["width"]
    max_context = int(site.attributes["max_context"])
    pad = max(16, power_of_two(width))
    # What shared memory holds of queries and keys.
    most = 16 if site.dtypes["q"] == "f32" or pad > 256 else 64
    constants = {
        "NUM_HEADS": heads,
        "WIDTH": width,
        "WIDTH_PAD": pad,
        "TOP_K": site.axes["top_k"],
        "MAX_CONTEXT": max_context,
        "PAGE_SIZE": site.page_size,
        "TABLE_WIDTH": site.table_width,
        "Q_STRIDE": site.strides["q"],
        "WEIGHT_STRIDE": site.strides["weights"],
        "OUT_STRIDE": site.strides["selected"],
        "SEQUENCES": max(2, power_of_two(site.limits.max_batch_size)),
        "HEADS": min(most, max(16, power_of_two(heads))),
        "BLOCK_N": most,
        "SPLIT_KEYS": _SPLIT_KEYS,
        "BLOCK": min(_BLOCK, max(_LEAST_BLOCK, power_of_two(max_context))),
    }
    return scratch_launch(
        site,
        function,
        {name: value for name, value in constants.items() if name in function.arg_names},
        grid,
        num_warps=4,
        num_stages=1 if most == 16 else 2,
        scratch={_ORDER: "i32"} if _ORDER in function.arg_names else {},
    )
