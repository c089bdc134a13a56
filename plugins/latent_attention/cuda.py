"""How latent_attention runs on a GPU: sequences with one new token split over their latents, others
in tiles.

With a selection the kernels are the same: the slots of a row's tokens are pages of one token, the
row has a page table of its own, and sees no more than the selection holds. MOST_SEEN says how many
that are; 0: there is none. A tile is of one token then.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from trtc.plugins.attention.split_kv import CUDA
from trtc.plugins.attention.triton import find_sequence, splits_of
from trtc.plugins.gpu.lowering import ONE, Extent, Launch, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs
from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.plugins.latent_attention.triton import attend_latents
from trtc.plugins.latents.triton import expansion, expansion_constants, place_of

_ALIGNMENT = 64
"""Splits are as long as a multiple of it: every BLOCK_N divides it."""
_SPLITS: tuple[tuple[int, int], ...] = ((8, 64), (32, 256), (128, 512))
"""(tiles of heads in a decode step, at most; least keys of a split). A split writes partial sums of
2 KiB for each head, so splits are only as short as the GPU needs to be filled."""
_LONGEST_SPLIT = 1024
_COMBINE_HEADS = 2
_WGMMA_PREFILL_KEYS = 64
"""With 32 a prefill took 1.6 times as long (H100). Elsewhere shared memory holds sums as well."""
_LEAST_ROWS = 16
"""Of a product."""
_PARTIAL, _STATS = "partial", "stats"
"""Scratch buffers: f32 [sequences, splits, heads, rank], and pairs (largest score, sum of weights)
beside it."""
_SCRATCH: Mapping[str, str] = {_PARTIAL: "f32", _STATS: "f32"}


@triton.jit
def latent_split(
    q,
    pool,
    query_start,
    context_lens,
    page_table,
    dims,
    out,
    partial,
    stats,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MOST_SEEN: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One split of a sequence with one new token; a context of one split is complete."""
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    if sequence < tl.load(dims + 1):
        row = tl.load(query_start + sequence).to(tl.int64)
        num_new = tl.load(query_start + sequence + 1) - row
        context = _seen(tl.load(context_lens + sequence), MOST_SEEN)
        _, length, num_splits = splits_of(context, 0, False, SPLITS, SPLIT_KEYS, ALIGNMENT)
        if (num_new == 1) & (split < num_splits):
            is_head = head < NUM_HEADS
            begin = split * length
            largest, total, weighted = attend_latents(
                q, row * Q_STRIDE + head * (RANK + ROPE), is_head,
                tl.zeros([HEADS], tl.int32) + context - 1, begin,
                tl.minimum(begin + length, context), pool,
                _pages(page_table, sequence, row, TABLE_WIDTH, MOST_SEEN),
                RANK, ROPE, RANK_PAD, ROPE_PAD, PAGE_SIZE, BLOCK_N, SCALE,
            )  # fmt: skip
            column = tl.arange(0, RANK_PAD)
            inside = is_head[:, None] & (column < RANK)[None, :]
            if num_splits == 1:
                target = out + row * OUT_STRIDE + head[:, None] * RANK + column[None, :]
                result = weighted / total[:, None]
                tl.store(target, result.to(out.dtype.element_ty), mask=inside)
            else:
                place = (tl.cast(sequence, tl.int64) * SPLITS + split) * NUM_HEADS + head
                tl.store(partial + place[:, None] * RANK + column[None, :], weighted, mask=inside)
                tl.store(stats + 2 * place, largest, mask=is_head)
                tl.store(stats + 2 * place + 1, total, mask=is_head)


@triton.jit
def _seen(tokens, MOST_SEEN: tl.constexpr):
    return tl.minimum(tokens, MOST_SEEN) if MOST_SEEN > 0 else tokens


@triton.jit
def _pages(page_table, sequence, row, TABLE_WIDTH: tl.constexpr, MOST_SEEN: tl.constexpr):
    return page_table + (row if MOST_SEEN > 0 else tl.cast(sequence, tl.int64)) * TABLE_WIDTH


@triton.jit
def latent_combine(
    query_start,
    context_lens,
    dims,
    partial,
    stats,
    out,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MOST_SEEN: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    sequence = tl.program_id(1)
    if sequence < tl.load(dims + 1):
        row = tl.load(query_start + sequence).to(tl.int64)
        num_new = tl.load(query_start + sequence + 1) - row
        context = _seen(tl.load(context_lens + sequence), MOST_SEEN)
        _, _, num_splits = splits_of(context, 0, False, SPLITS, SPLIT_KEYS, ALIGNMENT)
        if (num_new == 1) & (num_splits > 1):
            is_head = head < NUM_HEADS
            column = tl.arange(0, RANK_PAD)
            inside = is_head[:, None] & (column < RANK)[None, :]
            largest = tl.full([HEADS], float("-inf"), tl.float32)
            total = tl.zeros([HEADS], tl.float32)
            weighted = tl.zeros([HEADS, RANK_PAD], tl.float32)
            for split in range(num_splits):
                place = (tl.cast(sequence, tl.int64) * SPLITS + split) * NUM_HEADS + head
                theirs = tl.load(stats + 2 * place, mask=is_head, other=0.0)
                sums = tl.load(
                    partial + place[:, None] * RANK + column[None, :], mask=inside, other=0.0
                )
                new_largest = tl.maximum(largest, theirs)
                shrink = tl.exp2(largest - new_largest)
                by = tl.exp2(theirs - new_largest)
                counted = tl.load(stats + 2 * place + 1, mask=is_head, other=1.0)
                total = total * shrink + counted * by
                weighted = weighted * shrink[:, None] + sums * by[:, None]
                largest = new_largest
            target = out + row * OUT_STRIDE + head[:, None] * RANK + column[None, :]
            result = weighted / total[:, None]
            tl.store(target, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def latent_prefill(
    q,
    pool,
    query_start,
    context_lens,
    page_table,
    dims,
    out,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    LEAST_NEW: tl.constexpr,
    ROOM: tl.constexpr,
    MOST_CONTEXT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    MOST_SEEN: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sequences with one new token are passed over, and those that are expanded."""
    launch_dependents(OVERLAPS)
    wait_for_inputs(OVERLAPS)
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    # The last tiles have the most latents before them: they come first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    num_sequences = tl.load(dims + 1)
    sequence, first_new = find_sequence(tile, query_start, num_sequences, BLOCK_Q)
    first_row = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - first_row
    is_mine = (first_new < num_new) & (num_new > 1)
    if LEAST_NEW > 0:
        taken, ends = expansion(
            query_start,
            context_lens,
            num_sequences,
            LEAST_NEW,
            ROOM,
            MOST_CONTEXT,
            ALIGNMENT,
            SEQUENCES,
        )
        is_mine = is_mine & (place_of(sequence, taken, ends, ROOM) < 0)
    if is_mine:
        m = tl.arange(0, BLOCK_M)
        new = first_new + m // HEADS
        head = tl.program_id(0) * HEADS + m % HEADS
        is_row = (new < num_new) & (head < NUM_HEADS)
        row = (first_row + new).to(tl.int64)
        before = tl.load(context_lens + sequence) - num_new
        _, total, weighted = attend_latents(
            q, row * Q_STRIDE + head * (RANK + ROPE), is_row, before + new, 0,
            _seen(before + tl.minimum(first_new + BLOCK_Q, num_new), MOST_SEEN), pool,
            _pages(page_table, sequence, (first_row + first_new).to(tl.int64), TABLE_WIDTH,
                   MOST_SEEN),
            RANK, ROPE, RANK_PAD, ROPE_PAD, PAGE_SIZE, BLOCK_N, SCALE,
        )  # fmt: skip
        column = tl.arange(0, RANK_PAD)
        inside = is_row[:, None] & (column < RANK)[None, :]
        target = out + (row * OUT_STRIDE + head * RANK)[:, None] + column[None, :]
        result = weighted / total[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class _Tile:
    """Tactic of one kernel."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def lower(site: Site) -> tuple[Variant, ...]:
    most = site.limits.max_num_tokens
    mixed, scratch = _splits(site, site.limits.max_batch_size, _LONGEST_SPLIT)
    decodes = [(rows, *_splits(site, rows, keys)) for rows, keys in _lengths(site)]
    return (
        *(
            Variant(work=work, max_rows=rows, kind="decode", scratch=buffers)
            for rows, work, buffers in decodes
        ),
        Variant(work=(*mixed, _prefill(site)), max_rows=most, scratch=scratch),
    )


def _lengths(site: Site) -> Iterator[tuple[int, int]]:
    """(sequences of a decode step, at most; least keys of a split), ascending."""
    most = site.limits.max_batch_size
    for tiles, keys in _SPLITS:
        rows = tiles // _head_tiles(site)
        if rows >= most:
            yield most, keys
            return
        if rows:
            yield rows, keys
    yield most, _LONGEST_SPLIT


def _splits(site: Site, sequences: int, keys: int) -> tuple[tuple[Launch, ...], Mapping[str, int]]:
    """The launches for up to so many sequences with one new token, whose splits have `keys` keys at
    least; and their buffers."""
    heads = int(site.attributes["num_heads"])
    most = min(CUDA.max_splits, -(-CUDA.most(site.limits.max_seq_len) * CUDA.keys // keys))
    lengths = {"SPLITS": most, "SPLIT_KEYS": keys, "ALIGNMENT": _ALIGNMENT}
    block, times = max(1, keys // CUDA.keys), max(1, CUDA.keys // keys)
    tile = _decode_tile(site)
    split = _launch(
        site,
        latent_split,
        {**_reading(site), **_writing(site), **lengths, "HEADS": tile.rows, "BLOCK_N": tile.keys},
        (
            Extent(times=_head_tiles(site)),
            Extent("sequences"),
            Extent("splits", block=block, times=times),
        ),
        tile,
    )
    combine = _launch(
        site,
        latent_combine,
        {**_writing(site), **lengths, "HEADS": _COMBINE_HEADS},
        (Extent(times=-(-heads // _COMBINE_HEADS)), Extent("sequences"), ONE),
        replace(tile, num_warps=4, num_stages=1),
    )
    places = sequences * most * heads
    buffers = {_PARTIAL: places * site.axes["rank"] * 4, _STATS: places * 2 * 4}
    # A bucket whose contexts are all of one split has nothing to combine.
    return (split, replace(combine, least_splits=block + 1 if times == 1 else 0)), buffers


def _prefill(site: Site) -> Launch:
    tile = _prefill_tile(site)
    heads = min(tile.rows, power_of_two(int(site.attributes["num_heads"])))
    if site.has("selected"):
        heads = max(heads, _LEAST_ROWS)
        tile = replace(tile, rows=heads)
    return _launch(
        site,
        latent_prefill,
        {
            **_reading(site),
            **_writing(site),
            **expansion_constants(site),
            "HEADS": heads,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
        },
        (
            Extent(times=-(-int(site.attributes["num_heads"]) // heads)),
            Extent("tokens", block=tile.rows // heads, plus="sequences"),
            ONE,
        ),
        tile,
    )


def _launch(
    site: Site,
    function: triton.JITFunction,
    constants: Mapping[str, int | float | bool | str],
    grid: tuple[Extent, Extent, Extent],
    tile: _Tile,
) -> Launch:
    names = function.arg_names
    scratch = {name: kind for name, kind in _SCRATCH.items() if name in names}
    used = {name: value for name, value in constants.items() if name in names}
    return scratch_launch(
        site,
        function,
        used,
        grid,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        scratch=scratch,
        renamed={"page_table": "selected"} if site.has("selected") else None,
    )


def _reading(site: Site) -> dict[str, int | float]:
    rope = site.axes["width"] - site.axes["rank"]
    is_selected = site.has("selected")
    return {
        "ROPE": rope,
        "ROPE_PAD": max(16, power_of_two(rope)),
        "PAGE_SIZE": 1 if is_selected else site.page_size,
        "TABLE_WIDTH": site.strides["selected"] if is_selected else site.table_width,
        "Q_STRIDE": site.strides["q"],
        "SCALE": float(site.attributes["scale"]),
    }


def _writing(site: Site) -> dict[str, int | float]:
    rank = site.axes["rank"]
    return {
        "NUM_HEADS": int(site.attributes["num_heads"]),
        "RANK": rank,
        "RANK_PAD": max(16, power_of_two(rank)),
        "OUT_STRIDE": site.strides["out"],
        "MOST_SEEN": site.axes["top_k"] if site.has("selected") else 0,
    }


def _head_tiles(site: Site) -> int:
    """Programs that share the heads of a sequence."""
    return -(-int(site.attributes["num_heads"]) // _decode_tile(site).rows)


def _decode_tile(site: Site) -> _Tile:
    """The fewest heads that tensor cores multiply, or more if there are many: each tile of heads
    reads the latents again."""
    if site.dtypes["q"] == "f32":
        return _Tile(16, 16, num_warps=4, num_stages=1)
    heads = int(site.attributes["num_heads"])
    rows = 16 if heads <= 16 else 32 if heads <= 32 else 64
    return _tile(site, rows)


def _prefill_tile(site: Site) -> _Tile:
    if site.dtypes["q"] == "f32":
        return _Tile(16, 16, num_warps=4, num_stages=1)
    tile = _tile(site, 64)
    return replace(tile, keys=_WGMMA_PREFILL_KEYS) if site.arch.has_wgmma else tile


def _tile(site: Site, rows: int) -> _Tile:
    """What the shared memory holds of queries and latents of DeepSeek's size; more rows
    need the registers of 8 warps."""
    if not site.arch.has_large_shared:
        return _Tile(min(rows, 32), 16 if rows > 16 else 32, num_warps=4, num_stages=1)
    return _Tile(rows, 32, num_warps=8 if rows > 16 else 4, num_stages=2)
