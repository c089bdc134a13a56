"""How expanded_latent_attention runs on a GPU: two launches expand the latents of the step's
prompts, a third attends to them. Steps without a prompt need none."""

from dataclasses import dataclass

import triton

from trtc.plugins.expanded_latent_attention.triton import expand_latents, expanded_prefill
from trtc.plugins.gpu.lowering import ONE, Extent, Grid, Launch, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.plugins.latents.triton import expansion_constants
from trtc.protos.dtypes import DTYPES

_WIDE_KEYS, _WIDE_VALUES = "wide_keys", "wide_values"
"""Scratch buffers: [heads, room, head_dim] and [heads, room, value_dim] of the activation type."""
_EXPANDING_PROGRAMS = 2
"""For each multiprocessor. They share the tiles, so that a step with few starts no more."""

_WIDE_HEADS = 384
"""Channels of a head's key and value, from which on shared memory holds two stages only."""


@dataclass(frozen=True)
class _Tile:
    """Tactic of one kernel."""

    rows: int
    columns: int
    """Keys, or columns of a product."""
    num_warps: int
    num_stages: int
    depth: int = 0
    """Of a product's blocks."""


def lower(site: Site) -> tuple[Variant, ...]:
    least, most = int(site.attributes["least_new"]), site.limits.max_num_tokens
    dtype, room = site.dtypes["q"], int(site.attributes["room"])
    heads, values = int(site.attributes["num_heads"]), site.axes["value_dim"]
    element = DTYPES[dtype].num_bytes(1)
    none = (
        Variant(work=(), max_rows=site.limits.max_batch_size, kind="decode"),
        Variant(work=(), max_rows=least - 1),
    )
    work = (
        _expand(site, "keys", _WIDE_KEYS, int(site.attributes["head_dim"]) - site.axes["nope"]),
        _expand(site, "values", _WIDE_VALUES, 0),
        _prefill(site),
    )
    scratch = {
        _WIDE_KEYS: heads * room * int(site.attributes["head_dim"]) * element,
        _WIDE_VALUES: heads * room * values * element,
    }
    return (*none, Variant(work=work, max_rows=most, scratch=scratch))


def _expand(site: Site, weight: str, buffer: str, rest: int) -> Launch:
    """Keys ([rank, nope] for each head) have `rest` columns of the latent behind them."""
    tile = _expand_tile(site)
    columns = site.axes["nope" if weight == "keys" else "value_dim"]
    heads = int(site.attributes["num_heads"])
    block = min(tile.columns, max(16, power_of_two(columns)))
    tiles = int(site.attributes["room"]) // tile.rows * heads * -(-columns // block)
    return _launch(
        site,
        expand_latents,
        {
            "N": columns,
            "REST": rest,
            "REST_PAD": power_of_two(max(1, rest)),
            "TRANSPOSED": weight == "values",
            "ROPE": site.axes["width"] - site.axes["rank"],
            "RANK": site.axes["rank"],
            "NUM_HEADS": heads,
            "PAGE_SIZE": site.page_size,
            "TABLE_WIDTH": site.table_width,
            "BLOCK_M": tile.rows,
            "BLOCK_N": block,
            "BLOCK_K": min(tile.depth, max(16, power_of_two(site.axes["rank"]))),
        },
        (Extent(times=min(tiles, _EXPANDING_PROGRAMS * site.arch.multiprocessors)), ONE, ONE),
        tile,
        {"weight": weight, "wide": buffer},
    )


def _prefill(site: Site) -> Launch:
    tile = _prefill_tile(site)
    head_dim, value_dim = int(site.attributes["head_dim"]), site.axes["value_dim"]
    wide = 1 << (head_dim.bit_length() - 1)
    return _launch(
        site,
        expanded_prefill,
        {
            "HEAD_DIM": head_dim,
            "WIDE": wide,
            "REST_PAD": max(16, power_of_two(max(1, head_dim - wide))),
            "VALUE_DIM": value_dim,
            "VALUE_PAD": max(16, power_of_two(value_dim)),
            "Q_STRIDE": site.strides["q"],
            "OUT_STRIDE": site.strides["out"],
            "SCALE": float(site.attributes["scale"]),
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
        },
        (
            Extent("tokens", block=tile.rows, plus="sequences"),
            Extent(times=int(site.attributes["num_heads"])),
            ONE,
        ),
        tile,
        {},
    )


def _launch(
    site: Site,
    function: triton.JITFunction,
    constants: dict[str, int | float | bool | str],
    grid: Grid,
    tile: _Tile,
    renamed: dict[str, str],
) -> Launch:
    dtype = site.dtypes["q"]
    return scratch_launch(
        site,
        function,
        {**constants, **expansion_constants(site)},
        grid,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        scratch={_WIDE_KEYS: dtype, _WIDE_VALUES: dtype},
        renamed=renamed,
    )


def _expand_tile(site: Site) -> _Tile:
    if site.dtypes["q"] == "f32":
        return _Tile(32, 32, num_warps=4, num_stages=1, depth=32)
    if site.arch.has_wgmma:
        return _Tile(128, 128, num_warps=4, num_stages=3, depth=64)
    return _Tile(64, 64, num_warps=4, num_stages=2, depth=64)


def _prefill_tile(site: Site) -> _Tile:
    if site.dtypes["q"] == "f32":
        return _Tile(16, 16, num_warps=4, num_stages=1)
    if site.arch.has_wgmma:
        widths = power_of_two(int(site.attributes["head_dim"])) + power_of_two(
            site.axes["value_dim"]
        )
        return _Tile(128, 64, num_warps=8, num_stages=3 if widths <= _WIDE_HEADS else 2)
    if site.arch.has_large_shared:
        return _Tile(64, 32, num_warps=4, num_stages=2)
    return _Tile(32, 16, num_warps=4, num_stages=1)
