"""Attention of sequences with several new tokens: how prefill_sm90.cu is launched."""

from dataclasses import dataclass

from trtc.plugins.cuda.compile import SHARED_BYTES
from trtc.plugins.cuda.cpp import CudaSource
from trtc.plugins.cuda.launch import DIMS, ONE, Extent, Launch, Site
from trtc.plugins.paged_attention.cuda_cpp import (
    COUNTER,
    OPTIONAL,
    constants,
    group,
    launch,
    parameters,
    row_bytes,
    supports,
)

SM = 90
_ROWS = 128
"""Of a tile: tokens times the heads of a group."""
_THREADS = 384
_ALIGNMENT = 1024
"""Bytes. Of the panels, and so of all shared memory's size."""
_PROGRAMS = 132
"""As many multiprocessors as a chip of this SM has; programs take tiles until there are none."""


@dataclass(frozen=True)
class Tile:
    """How a program goes about a tile of 128 rows."""

    block_n: int
    """Keys of a product."""
    stages: int
    """Blocks of keys in shared memory."""
    producer_registers: int
    consumer_registers: int
    """Of a thread: 128 producers and 256 consumers share 65536."""


def available(site: Site) -> bool:
    """Whether the kernel is there and a block's shared memory holds what it needs."""
    return (
        site.sm == SM
        and supports(site)
        and group(site) <= _ROWS
        and _shared_bytes(site, tile_of(site)) <= SHARED_BYTES[SM]
    )


def prefill(site: Site) -> Launch:
    """Right for every step: sequences with one new token are passed over. COUNTER must be 0."""
    tile = tile_of(site)
    shared = _shared_bytes(site, tile)
    steps = ("query_start", "context_lens", "page_table")
    names = ("q", "pool", *steps, *OPTIONAL, DIMS, "out", COUNTER)
    source = CudaSource(
        file="paged_attention/prefill_sm90.cu",
        entry="attention_prefill",
        parameters=parameters(site, names),
        constants={
            **constants(site),
            "TOKENS": _ROWS // group(site),
            "BLOCK_N": tile.block_n,
            "STAGES": tile.stages,
            "PRODUCER_REGISTERS": tile.producer_registers,
            "CONSUMER_REGISTERS": tile.consumer_registers,
            "SHARED_BYTES": shared,
            "MAX_SEQUENCES": site.limits.max_batch_size,
        },
        num_threads=_THREADS,
        shared_bytes=shared,
    )
    return launch(site, source, (Extent(times=_PROGRAMS), ONE, ONE))


def tile_of(site: Site) -> Tile:
    """What was fastest on an H200 for Llama-3.1-8B's heads, by TFLOP/s over causal prompts (128
    keys, E4M3 out, the launches for sequences with one new token included).

    | pool, stages | 1 x 4096 | 2 x 4096 | 8 x 1024 | 1 x 8192 | 16 x 512 |
    |---|---|---|---|---|---|
    | bf16, 2 | 495 | 515 | 356 | 556 | 234 |
    | bf16, 3 | 481 | 512 | 357 | 555 | 240 |
    | bf16, 2, groups not in turns | 497 | 507 | 354 | 521 | 254 |
    | E4M3, 2 | 441 | 451 | 317 | 485 | 228 |
    | E4M3, 2, groups not in turns | 440 | 450 | 317 | 495 | 230 |

    Before copies arrived by themselves these were 429, 439, 310, 466 and 220 (bf16). Then 56 and
    224 registers were better than 88 and 208 for bf16, and worse for E4M3; 64 keys were 10 to 15%
    slower.
    """
    wide = site.dtypes["pool"] == "f8e4m3"
    return Tile(
        block_n=128 if site.kv.head_dim <= 128 else 64,
        stages=2,
        producer_registers=88 if wide else 56,
        consumer_registers=208 if wide else 224,
    )


def _shared_bytes(site: Site, tile: Tile) -> int:
    """Queries, stages of K and V in panels of 64 columns, E4M3 as it is stored, and bookkeeping."""
    panel_bytes = -(-site.kv.head_dim // 64) * 128
    raw = tile.block_n * row_bytes(site) if site.dtypes["pool"] == "f8e4m3" else 16
    bookkeeping = 1024 + 4 * site.limits.max_batch_size
    used = (_ROWS + 2 * tile.stages * tile.block_n) * panel_bytes + 2 * raw + bookkeeping
    return -(-used // _ALIGNMENT) * _ALIGNMENT
