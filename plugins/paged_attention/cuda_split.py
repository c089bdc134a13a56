"""Attention of sequences with one new token: how split.cu and combine.cu are launched."""

from collections.abc import Mapping
from dataclasses import dataclass

from trtc.plugins.cuda.compile import SHARED_BYTES
from trtc.plugins.cuda.cpp import CudaSource
from trtc.plugins.cuda.launch import DIMS, ONE, Extent, Launch, Site
from trtc.plugins.paged_attention.cuda_cpp import (
    COUNTER,
    OPTIONAL,
    PARTIAL,
    STATS,
    TILE,
    constants,
    group,
    launch,
    max_pieces,
    parameters,
    row_bytes,
    splits_of_piece,
)

_HEADS_TIMES_ELEMENTS = 16 * 128
"""Sums that a warp has room for in its registers; heads are padded to 8 or 16."""
_COMBINE_THREADS = 128
_WARP_BYTES = 19000
"""Of K and V on their way to one warp."""
_SMALL_SHARED_BYTES = 100 << 10
"""Of a block, on SMs that have little more for all their blocks."""


@dataclass(frozen=True)
class Split:
    """The launches, one after the other, and the scratch that they share."""

    launches: tuple[Launch, ...]
    scratch: Mapping[str, int]


@dataclass(frozen=True)
class Tile:
    """How a program of split.cu goes about its piece."""

    warps: int
    """They take tiles of 16 keys in turn. It decides the order of sums: one for all steps."""
    stages: int
    """Tiles of each warp that are on their way from memory."""


def split(site: Site, *, counter: bool) -> Split:
    """Right for every step: sequences with other than one new token are passed over.

    Args:
        counter: the second launch sets COUNTER to 0.
    """
    rows = site.limits.max_batch_size * max_pieces(site) * int(site.attributes["num_heads"])
    return Split(
        launches=(_split_launch(site, tile_of(site)), _combine_launch(site, counter)),
        scratch={
            PARTIAL: rows * site.kv.head_dim * 4,
            STATS: rows * 2 * 4,
            **({COUNTER: 4} if counter else {}),
        },
    )


def tile_of(site: Site) -> Tile:
    """What was fastest on an H200 for Llama-3.1-8B's heads, by microseconds a layer at 1024 tokens
    (pools of many layers in turn, in a CUDA graph; one KV head a program throughout). Other rows
    get as many bytes under way, and SMs with less shared memory half of them.

    | pool, keys of a piece | warps x stages | batch 1 | 16 | 64 | 128 | 256 |
    |---|---|---|---|---|---|---|
    | bf16, 256 | 4 x 2 | 6.1 | 20.0 | 63.5 | 128 | 262 |
    | bf16, 256 | 4 x 3 | 5.6 | 20.2 | 66.2 | 131 | 268 |
    | bf16, 256 | 8 x 1 | 6.6 | 20.5 | 66.2 | 131 | 267 |
    | bf16, 256 | 8 x 2 | 4.4 | 27.5 | 87.9 | 167 | 336 |
    | bf16, 512 | 4 x 3 | 8.8 | 18.7 | 64.3 | 127 | 257 |
    | E4M3, 256 | 4 x 2 | 5.9 | 12.5 | 37.5 | 72.6 | 147 |
    | E4M3, 256 | 4 x 3 | 5.1 | 13.8 | 38.1 | 74.2 | 151 |
    | E4M3, 512 | 4 x 2 | 8.0 | 14.8 | 37.0 | 71.0 | 141 |
    | E4M3, 512 | 4 x 3 | 7.3 | 12.3 | 37.3 | 71.2 | 141 |
    | E4M3, 512 | 4 x 4 | 7.9 | 12.2 | 40.1 | 75.1 | 147 |
    """
    under_way = _WARP_BYTES if SHARED_BYTES[site.sm] > _SMALL_SHARED_BYTES else _WARP_BYTES // 2
    return Tile(warps=4, stages=max(1, min(4, under_way // _stage_bytes(site))))


def _split_launch(site: Site, tile: Tile) -> Launch:
    heads = group(site)
    head_tiles = -(-heads // (16 if site.kv.head_dim <= _HEADS_TIMES_ELEMENTS // 16 else 8))
    heads_of_tile = -(-heads // head_tiles)
    padded_heads = -(-heads_of_tile // 8) * 8
    sums = padded_heads * (site.kv.head_dim + 4) * 4
    shared = tile.warps * (max(tile.stages * _stage_bytes(site), sums) + 8 * padded_heads)
    steps = ("query_start", "context_lens", "page_table")
    names = ("q", "pool", *steps, *OPTIONAL, DIMS, "out", PARTIAL, STATS)
    source = CudaSource(
        file="paged_attention/split.cu",
        entry="attention_split",
        parameters=parameters(site, names),
        constants={
            **constants(site),
            "HEAD_TILES": head_tiles,
            "WARPS": tile.warps,
            "STAGES": tile.stages,
            "SHARED_BYTES": shared,
        },
        num_threads=32 * tile.warps,
        shared_bytes=shared,
    )
    grid = (
        Extent(times=site.kv.num_kv_heads * head_tiles),
        Extent("sequences"),
        Extent("splits", block=splits_of_piece(site)),
    )
    return launch(site, source, grid)


def _combine_launch(site: Site, counter: bool) -> Launch:
    num_heads = int(site.attributes["num_heads"])
    heads = max(1, _COMBINE_THREADS // (site.kv.head_dim // 4))
    scales = [name for name in OPTIONAL if name != "k_scale"]
    counters = [COUNTER] if counter else []
    names = ("query_start", "context_lens", *scales, *counters, DIMS, PARTIAL, STATS, "out")
    source = CudaSource(
        file="paged_attention/combine.cu",
        entry="attention_combine",
        parameters=parameters(site, names),
        constants={**constants(site), "HEADS": heads, "HAS_COUNTER": int(counter)},
        num_threads=_COMBINE_THREADS,
        shared_bytes=0,
    )
    return launch(site, source, (Extent(times=-(-num_heads // heads)), Extent("sequences"), ONE))


def _stage_bytes(site: Site) -> int:
    """Shared memory of one tile of one warp: its keys, then its values, in rows that are padded
    against conflicts of banks."""
    row = row_bytes(site)
    share = 4 * next((size for size in (16, 8) if row % (4 * size) == 0), 4)
    key_pitch = row if row // share % 2 else row + share
    value_pitch = -(-(row - 16) // 64) * 64 + 16
    return TILE * (key_pitch + value_pitch)
