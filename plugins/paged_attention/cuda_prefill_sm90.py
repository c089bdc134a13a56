"""Attention of sequences with several new tokens: how prefill_sm90.cu is launched."""

from dataclasses import dataclass, replace

from trtc.plugins.attention.tiles_sm90 import (
    PANEL_BYTES,
    PROGRAMS,
    ROWS,
    THREADS,
    Tile,
    query_map,
)
from trtc.plugins.gpu.arch import SM_90
from trtc.plugins.gpu.lowering import DIMS, ONE, Extent, Launch, Site, TileMap
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.paged_attention.cuda_cpp import (
    COUNTER,
    OPTIONAL,
    constants,
    group,
    launch,
    parameters,
    row_bytes,
    scale_bytes,
    supports,
)

_PLANES = 1 << 30
"""Keys or values of a page, as many as coordinates reach: how many pages a pool has is known when
an engine is opened."""


@dataclass(frozen=True)
class PoolTile:
    """Tactic, by what the pool holds."""

    products: Tile
    raw_stages: int
    """Blocks of E4M3 in shared memory, before they are widened."""


def available(site: Site) -> bool:
    """Whether the kernel is there and a block's shared memory holds what it needs."""
    return (
        site.arch.has_wgmma
        and supports(site)
        and scale_bytes(site) == 0
        and group(site) <= ROWS
        and _shared_bytes(site, tile_of(site)) <= SM_90.shared_bytes
    )


def prefill(site: Site) -> Launch:
    """Right for every step: sequences with one new token are passed over. COUNTER must be 0."""
    tile = tile_of(site)
    shared = _shared_bytes(site, tile)
    steps = ("query_start", "context_lens", "page_table")
    maps = (query_map(site, site.axes["head_dim"], group(site)), *_pool_maps(site, tile))
    names = (*steps, *OPTIONAL, DIMS, "out", COUNTER, *(one.parameter for one in maps))
    source = CudaSource(
        file="paged_attention/prefill_sm90.cu",
        entry="attention_prefill",
        parameters=parameters(site, names),
        constants={
            **constants(site),
            "VALUE_DIM": site.axes["head_dim"],
            "TOKENS": ROWS // group(site),
            **tile.products.constants,
            "RAW_STAGES": tile.raw_stages,
            "SHARED_BYTES": shared,
            "MAX_SEQUENCES": site.limits.max_batch_size,
        },
        num_threads=THREADS,
        shared_bytes=shared,
    )
    return launch(site, source, (Extent(times=PROGRAMS), ONE, ONE), maps)


def _pool_maps(site: Site, tile: PoolTile) -> tuple[TileMap, TileMap]:
    """[keys or values of a page, KV heads, tokens, bytes of a head], by what a block has of a page,
    and by single tokens."""
    head, page_size = row_bytes(site), site.page_size
    token = site.axes["num_kv_heads"] * head

    def by(tokens: int) -> TileMap:
        return TileMap(
            parameter="pool",
            sizes=(head, page_size, site.axes["num_kv_heads"], _PLANES),
            strides=(token, head, page_size * token),
            box=(PANEL_BYTES, tokens, 1, 1),
        )

    return by(min(page_size, tile.products.block_n)), by(1)


def tile_of(site: Site) -> PoolTile:
    """What was fastest on an H200 for Llama-3.1-8B's heads, by TFLOP/s over causal prompts (128
    keys, E4M3 out, the launches for sequences with one new token included).

    | pool | 1 x 4096 | 2 x 4096 | 1 x 8192 | 8 x 1024 | 16 x 512 |
    |---|---|---|---|---|---|
    | bf16, 56 and 224 registers | 618 | 600 | 616 | 449 | 320 |
    | bf16, 40 and 232 registers | 617 | 607 | 613 | 448 | 321 |
    | E4M3, 72 and 216 registers | 561 | 565 | 601 | 400 | 285 |
    | E4M3, 88 and 208 registers | 555 | 557 | 581 | 393 | 283 |
    | E4M3, a block before it is widened | 548 | 555 | 576 | 393 | 282 |

    Three stages and groups that take turns at the tensor cores changed nothing; three groups with
    blocks of 64 keys were 5 to 50% slower.
    """
    widens = site.dtypes["pool"] == "f8e4m3"
    products = Tile(
        block_n=128 if site.axes["head_dim"] <= 128 else 64,
        stages=2,
        producer_registers=72 if widens else 56,
        consumer_registers=216 if widens else 224,
    )
    tile = PoolTile(products, raw_stages=2 if widens else 0)
    if tile.raw_stages and _shared_bytes(site, tile) > SM_90.shared_bytes:
        return replace(tile, raw_stages=1)
    return tile


def _shared_bytes(site: Site, tile: PoolTile) -> int:
    """What every tile has, E4M3 in panels of its own, and the sequences' tiles."""
    raw_bytes = -(-row_bytes(site) // PANEL_BYTES) * PANEL_BYTES
    raw = 2 * tile.raw_stages * tile.products.block_n * raw_bytes
    more = raw + 4 * site.limits.max_batch_size
    return tile.products.shared_bytes(site.axes["head_dim"], site.axes["head_dim"], more)
