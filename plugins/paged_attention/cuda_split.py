"""Attention of sequences with one new token: how split.cu and combine.cu are launched."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from trtc.plugins.attention.split_kv import CUDA
from trtc.plugins.gpu.lowering import DIMS, ONE, Extent, Launch, Site
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.paged_attention.cuda_cpp import (
    COUNTER,
    OPTIONAL,
    PARTIAL,
    STATS,
    constants,
    group,
    launch,
    max_splits,
    parameters,
    row_bytes,
    scale_bytes,
    steps_per_split,
)

_HEADS_TIMES_ELEMENTS = 16 * 128
"""Sums that a warp has room for in its registers; heads are padded to 8 or 16."""
_LONGER: Mapping[int, tuple[tuple[int, int], ...]] = {
    1: ((768, 2), (1024, 4)),
    2: ((512, 2), (1024, 4)),
}
"""By `steps_per_split`: beyond so many programs, if a sequence had one split, splits are so many
times as long as the shortest. What they leave behind is written and read again, and is less then,
and there are enough programs without them. Decode steps of Llama-3.1-8B (8 programs a sequence) on
an H200, one chip, milliseconds, at 1024 tokens and in brackets at 64 to 1984 tokens:

| weights, pool | sequences | shortest | 2 x | 4 x | 8 x |
|---|---|---|---|---|---|
| fp8, bf16 | 64 | 4.59 (4.59) | 4.60 (4.58) | 4.65 (4.65) | 4.65 (4.81) |
| fp8, bf16 | 128 | 6.94 (7.05) | 6.87 (6.92) | 6.89 (6.93) | 6.88 (7.07) |
| fp8, bf16 | 192 | 9.67 | 9.61 | 9.60 | 9.60 |
| fp8, bf16 | 256 | 12.10 (12.04) | 11.85 (11.68) | 11.67 (11.66) | 11.68 (11.71) |
| bf16, bf16 | 128 | 8.81 | 8.71 | 8.69 | 8.70 |
| bf16, bf16 | 256 | 14.75 | 14.46 | 14.33 | 14.32 |
| fp8, E4M3 | 64 | 3.68 | 3.64 | 3.65 | 3.66 |
| fp8, E4M3 | 128 | 5.11 (5.12) | 5.04 (5.13) | 5.04 (5.24) | 5.04 (5.24) |
| fp8, E4M3 | 256 | 8.44 (8.36) | 8.31 (8.23) | 8.29 (8.28) | 8.24 (8.27) |

(The longer ones with two stages, the shortest as `tile_of` has them; combine.cu was launched each
time.) At 64 with an E4M3 pool 2 x took 3.70 of contexts of 64 to 1984 tokens, the shortest 3.62.
"""
_STAGES, _LONGER_STAGES = 4, 2
"""At most."""
_COMBINE_THREADS = 128
_WARP_BYTES = 19000
"""Bytes of K and V in flight, per warp."""


@dataclass(frozen=True)
class Split:
    """Launches in order, and their shared scratch buffers."""

    launches: tuple[Launch, ...]
    scratch: Mapping[str, int]


@dataclass(frozen=True)
class Tile:
    """Tactic of split.cu."""

    warps: int
    """Warps take tiles of 16 keys in turn. Their number decides the order of sums, so it is the
    same for all steps."""
    stages: int
    """Tiles of each warp that are on their way from memory."""


def lengths(site: Site) -> Iterator[tuple[int, int]]:
    """By ascending sequences, up to how many of them in a decode step splits should be so many
    times as long as the shortest."""
    most, times = site.limits.max_batch_size, 1
    for num_programs, longer in _LONGER[steps_per_split(site)]:
        rows = num_programs // _programs(site)
        if rows >= most:
            break
        yield rows, times
        times = longer
    yield most, times


def split(site: Site, *, counter: bool = False, times: int = 1) -> Split:
    """Right for every step: sequences with other than one new token are passed over.

    Args:
        counter: the second launch sets COUNTER to 0; else it is left out where every sequence has
            one split.
        times: how many times as long as the shortest a split is.
    """
    rows = site.limits.max_batch_size * max_splits(site, times) * int(site.attributes["num_heads"])
    return Split(
        launches=(_split_launch(site, times), _combine_launch(site, counter, times)),
        scratch={
            PARTIAL: rows * site.axes["head_dim"] * 4,
            STATS: rows * 2 * 4,
            **({COUNTER: 4} if counter else {}),
        },
    )


def tile_of(site: Site, times: int = 1) -> Tile:
    """For splits `times` as long as the shortest; longer ones: see _LONGER.

    What was fastest on an H200 for Llama-3.1-8B's heads, by microseconds a layer at 1024 tokens
    (pools of many layers in turn, in a CUDA graph; one KV head a program throughout). Other rows
    get as many bytes under way, and SMs with less shared memory half of them.

    | pool, keys of a split | warps x stages | batch 1 | 16 | 64 | 128 | 256 |
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
    under_way = _WARP_BYTES if site.arch.has_large_shared else _WARP_BYTES // 2
    most = _STAGES if times == 1 else _LONGER_STAGES
    return Tile(warps=4, stages=max(1, min(most, under_way // _stage_bytes(site))))


def _head_tiles(site: Site) -> int:
    """Programs that share the query heads of a KV head."""
    return -(-group(site) // (16 if site.axes["head_dim"] <= _HEADS_TIMES_ELEMENTS // 16 else 8))


def _programs(site: Site) -> int:
    """Of a split of a sequence."""
    return site.axes["num_kv_heads"] * _head_tiles(site)


def _split_launch(site: Site, times: int) -> Launch:
    tile, head_tiles = tile_of(site, times), _head_tiles(site)
    heads_of_tile = -(-group(site) // head_tiles)
    padded_heads = -(-heads_of_tile // 8) * 8
    sums = padded_heads * (site.axes["head_dim"] + 4) * 4
    shared = tile.warps * (max(tile.stages * _stage_bytes(site), sums) + 8 * padded_heads)
    if site.dtypes["pool"] == "u8":  # queries, which are turned as its keys are
        shared += heads_of_tile * site.axes["head_dim"] * 2
    steps = ("query_start", "context_lens", "page_table")
    names = ("q", "pool", *steps, *OPTIONAL, DIMS, "out", PARTIAL, STATS)
    source = CudaSource(
        file="paged_attention/split.cu",
        entry="attention_split",
        parameters=parameters(site, names),
        constants={
            **constants(site, times),
            "HEAD_TILES": head_tiles,
            "WARPS": tile.warps,
            "STAGES": tile.stages,
            "SHARED_BYTES": shared,
        },
        num_threads=32 * tile.warps,
        shared_bytes=shared,
    )
    grid = (
        Extent(times=_programs(site)),
        Extent("sequences"),
        Extent("splits", block=times * steps_per_split(site)),
    )
    return launch(site, source, grid)


def _combine_launch(site: Site, counter: bool, times: int) -> Launch:
    num_heads = int(site.attributes["num_heads"])
    heads = max(1, _COMBINE_THREADS // (site.axes["head_dim"] // 4))
    scales = [name for name in OPTIONAL if name != "k_scale"]
    counters = [COUNTER] if counter else []
    names = ("query_start", "context_lens", *scales, *counters, DIMS, PARTIAL, STATS, "out")
    source = CudaSource(
        file="paged_attention/combine.cu",
        entry="attention_combine",
        parameters=parameters(site, names),
        constants={**constants(site, times), "HEADS": heads, "HAS_COUNTER": int(counter)},
        num_threads=_COMBINE_THREADS,
        shared_bytes=0,
    )
    grid = (Extent(times=-(-num_heads // heads)), Extent("sequences"), ONE)
    least_splits = 0 if counter else times * steps_per_split(site) + 1
    return replace(launch(site, source, grid), least_splits=least_splits)


def _stage_bytes(site: Site) -> int:
    """Shared memory of one tile of one warp: its keys, then its values, in rows that are padded
    against conflicts of banks, and their scales."""
    row = row_bytes(site)
    share = 4 * next((size for size in (16, 8) if row % (4 * size) == 0), 4)
    key_pitch = row if row // share % 2 else row + share
    value_pitch = -(-(row - 16) // 64) * 64 + 16
    return CUDA.alignment * (key_pitch + value_pitch + 2 * scale_bytes(site))
