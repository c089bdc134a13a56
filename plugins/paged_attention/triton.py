"""Attention of whole steps in Triton, for SMs and element types without a kernel of their own:
tiles of plugins/attention/triton.py with the quantisation after them."""

import triton
import triton.language as tl

from trtc.plugins.attention.triton import Tile, attend, find_sequence, padded_head, tile_constants
from trtc.plugins.gpu.lowering import DIMS, ONE, Extent, Launch, Site
from trtc.plugins.gpu.sources import KernelParameter, KernelSource
from trtc.plugins.gpu.triton import launch_dependents, quantized, wait_for_inputs

_PARAMETERS = (
    "q",
    "pool",
    "query_start",
    "context_lens",
    "page_table",
    "k_scale",
    "v_scale",
    "pre_scale",
    "out_scale",
    "sinks",
    DIMS,
    "out",
)

_BOOKKEEPING = 8 << 10
"""Bytes of shared memory beside queries, keys and values."""


@triton.jit
def attention_prefill(
    q,
    pool,
    query_start,
    context_lens,
    page_table,
    k_scale,
    v_scale,
    pre_scale,
    out_scale,
    sinks,
    dims,
    out,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STORED: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    LEAST_NEW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sequences with fewer than LEAST_NEW new tokens are passed over."""
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PAD
    num_sequences = tl.load(dims + 1)
    kv_head = tl.program_id(0)
    # The last tiles have the most keys before them: they come first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, first_new = find_sequence(tile, query_start, num_sequences, BLOCK_Q)
    first_row = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - first_row
    if (first_new < num_new) & (num_new >= LEAST_NEW):
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, HEAD_PAD)
        new = first_new + m // GROUP_PAD
        row = (first_row + new).to(tl.int64)
        column = (kv_head * GROUP + m % GROUP_PAD)[:, None] * HEAD_DIM + d[None, :]
        inside = ((new < num_new) & (m % GROUP_PAD < GROUP))[:, None] & (d < HEAD_DIM)[None, :]
        before = tl.load(context_lens + sequence) - num_new
        sink = None
        if sinks is not None:
            head = kv_head * GROUP + tl.minimum(m % GROUP_PAD, GROUP - 1)
            sink = tl.load(sinks + head)
        result = attend(
            tl.load(q + row[:, None] * Q_STRIDE + column, mask=inside, other=0.0),
            before + new,
            before + first_new,
            before + tl.minimum(first_new + BLOCK_Q, num_new),
            pool,
            page_table + tl.cast(sequence, tl.int64) * TABLE_WIDTH,
            kv_head,
            SCALE * (1.0 if k_scale is None else tl.load(k_scale)),
            sink,
            NUM_KV_HEADS,
            HEAD_DIM,
            STORED,
            PAGE_SIZE,
            BLOCK_N,
            WINDOW,
            CHUNKED,
            SOFTCAP,
            "ieee",
        )
        if v_scale is not None:
            result = result * tl.load(v_scale)
        by_column = None if pre_scale is None else tl.load(pre_scale + column, mask=inside)
        by = None if out_scale is None else tl.load(out_scale)
        rounded = quantized(result, by_column, by, q.dtype.element_ty, out.dtype.element_ty)
        tl.store(out + row[:, None] * OUT_STRIDE + column, rounded, mask=inside)


def prefill(site: Site, *, least_new: int) -> Launch:
    """Right for every step, but for sequences with fewer than `least_new` new tokens."""
    num_kv_heads = site.axes["num_kv_heads"]
    group = int(site.attributes["num_heads"]) // num_kv_heads
    group_pad = triton.next_power_of_2(group)
    tile = tile_of(site, group_pad)
    overlaps = site.arch.has_pdl
    dtypes = {**site.dtypes, DIMS: "i32"}
    present = tuple(name for name in _PARAMETERS if name in dtypes)
    source = KernelSource(
        function=attention_prefill,
        parameters=tuple(KernelParameter(name, dtypes[name]) for name in present),
        constants={
            **tile_constants(
                site.attributes,
                head_dim=site.axes["head_dim"],
                stored_width=site.axes["stored_width"],
                num_kv_heads=num_kv_heads,
                page_size=site.page_size,
                tile=tile,
            ),
            "TABLE_WIDTH": site.table_width,
            "Q_STRIDE": site.strides["q"],
            "OUT_STRIDE": site.strides["out"],
            "LEAST_NEW": least_new,
            "OVERLAPS": overlaps,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        absent=tuple(name for name in _PARAMETERS if name not in dtypes),
        max_shared_bytes=site.arch.shared_bytes,
    )
    tiles = Extent("tokens", block=tile.block_m // group_pad, plus="sequences")
    return Launch(source, present, (Extent(times=num_kv_heads), tiles, ONE), overlaps)


def tile_of(site: Site, group_pad: int) -> Tile:
    """Large tiles where the shared memory holds them; f32 is multiplied without tensor cores."""
    head_pad = padded_head(site.axes["head_dim"])
    small = not site.arch.has_large_shared
    if site.dtypes["q"] == "f32":
        tile = Tile(16 if head_pad > 128 else 32, 16, num_warps=4, num_stages=1)
    elif head_pad > 256:
        tile = _tile_of_wide_heads(site, head_pad)
    elif head_pad > 128:
        tile = Tile(64, 32, num_warps=4, num_stages=1 if small else 2)
    elif small:
        tile = Tile(64, 64 if head_pad <= 64 else 32, num_warps=4, num_stages=2)
    else:
        tile = Tile(128, 64, num_warps=8, num_stages=2)
    return Tile(max(tile.block_m, group_pad), tile.block_n, tile.num_warps, tile.num_stages)


def _tile_of_wide_heads(site: Site, head_pad: int) -> Tile:
    """Queries and blocks of keys and values of a row are wide: as many as fit."""
    row = 2 * head_pad
    for tile in (Tile(64, 32, num_warps=8, num_stages=2), Tile(64, 32, num_warps=8, num_stages=1)):
        rows = tile.block_m + 2 * tile.num_stages * tile.block_n
        if rows * row + _BOOKKEEPING <= site.arch.shared_bytes:
            return tile
    return Tile(32, 32, num_warps=8, num_stages=1)
