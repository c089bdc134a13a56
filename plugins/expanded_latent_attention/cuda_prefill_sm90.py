"""Attention to expanded keys and values: how prefill_sm90.cu is launched."""

from trtc.plugins.attention.tiles_sm90 import PANEL_BYTES, PROGRAMS, THREADS, Tile, query_map
from trtc.plugins.expanded_latent_attention.buffers import (
    COUNTER,
    WIDE_KEYS,
    WIDE_VALUES,
    buffer_types,
)
from trtc.plugins.gpu.arch import SM_90
from trtc.plugins.gpu.lowering import DIMS, ONE, SCRATCH, Extent, Launch, Site, TileMap
from trtc.plugins.gpu.sources import CudaSource, KernelParameter
from trtc.plugins.latents.triton import expansion_constants
from trtc.protos.dtypes import DTYPES

_OPERAND = 16
"""Channels of a head are whole operands of the tensor cores."""
_MOST_VALUES = 256
"""Channels that a consumer's registers hold sums of."""
_WIDE_VALUES = 128
"""Channels up to which they hold scores of 128 keys beside the sums."""


def available(site: Site) -> bool:
    """Whether the kernel is there and a block's shared memory holds what it needs."""
    head_dim, value_dim = _widths(site)
    return (
        site.arch.has_wgmma
        and site.dtypes["q"] == "bf16"
        and head_dim % _OPERAND == 0
        and value_dim % _OPERAND == 0
        and value_dim <= _MOST_VALUES
        and _shared_bytes(site, tile_of(site)) <= SM_90.shared_bytes
    )


def prefill(site: Site) -> Launch:
    """For sequences that are expanded. COUNTER must be 0."""
    tile = tile_of(site)
    head_dim, value_dim = _widths(site)
    maps = (
        query_map(site, head_dim, group=1),
        _wide_map(site, WIDE_KEYS, head_dim, tile),
        _wide_map(site, WIDE_VALUES, value_dim, tile),
    )
    arguments = ("query_start", "context_lens", DIMS, "out", SCRATCH + COUNTER)
    dtypes = {DIMS: "i32", SCRATCH + COUNTER: "i32", **site.dtypes}
    source = CudaSource(
        file="expanded_latent_attention/prefill_sm90.cu",
        entry="expanded_attention",
        parameters=(
            *(KernelParameter(name.removeprefix(SCRATCH), dtypes[name]) for name in arguments),
            *(KernelParameter(one.parameter.removeprefix(SCRATCH), "bf16") for one in maps),
        ),
        constants={
            **expansion_constants(site),
            **tile.constants,
            "NUM_HEADS": int(site.attributes["num_heads"]),
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "OUT_STRIDE": site.strides["out"],
            "SCALE": float(site.attributes["scale"]),
            "SHARED_BYTES": _shared_bytes(site, tile),
        },
        num_threads=THREADS,
        shared_bytes=_shared_bytes(site, tile),
    )
    return Launch(
        kernel=source,
        arguments=arguments,
        grid=(Extent(times=PROGRAMS), ONE, ONE),
        overlaps=site.arch.has_pdl,
        maps=maps,
    )


def tile_of(site: Site) -> Tile:
    """The most keys at once that registers and shared memory hold."""
    wide = Tile(block_n=128, stages=2, producer_registers=40, consumer_registers=232)
    narrow = Tile(block_n=64, stages=2, producer_registers=40, consumer_registers=232)
    _, value_dim = _widths(site)
    fits = value_dim <= _WIDE_VALUES and _shared_bytes(site, wide) <= SM_90.shared_bytes
    return wide if fits else narrow


def _widths(site: Site) -> tuple[int, int]:
    """Of a head's key and value."""
    return int(site.attributes["head_dim"]), site.axes["value_dim"]


def _wide_map(site: Site, buffer: str, columns: int, tile: Tile) -> TileMap:
    """[heads * room, bytes], by blocks of keys."""
    row = DTYPES[buffer_types(site)[buffer]].num_bytes(columns)
    return TileMap(
        parameter=SCRATCH + buffer,
        sizes=(row, int(site.attributes["num_heads"]) * int(site.attributes["room"])),
        strides=(row,),
        box=(PANEL_BYTES, tile.block_n),
    )


def _shared_bytes(site: Site, tile: Tile) -> int:
    """What every tile has, and two counts of each sequence."""
    return tile.shared_bytes(*_widths(site), 8 * (expansion_constants(site)["SEQUENCES"] + 1))
