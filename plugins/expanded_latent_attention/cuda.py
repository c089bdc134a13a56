"""How expanded_latent_attention runs on a GPU: two launches expand the latents of the step's
prompts, a third attends to them. Steps without a prompt need none."""

from dataclasses import dataclass

import triton

from trtc.plugins.expanded_latent_attention import cuda_prefill_sm90
from trtc.plugins.expanded_latent_attention.buffers import (
    COUNTER,
    WIDE_KEYS,
    WIDE_VALUES,
    buffer_types,
    wide_bytes,
)
from trtc.plugins.expanded_latent_attention.triton import expand_latents, expanded_prefill
from trtc.plugins.gpu.lowering import ONE, Extent, Grid, Launch, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.plugins.latents.triton import expansion_constants

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
    on_sm90 = cuda_prefill_sm90.available(site)
    none = (
        Variant(work=(), max_rows=site.limits.max_batch_size, kind="decode"),
        Variant(work=(), max_rows=least - 1),
    )
    rest = int(site.attributes["head_dim"]) - site.axes["nope"]
    work = (
        _expand(site, "keys", WIDE_KEYS, rest, counter=on_sm90),
        _expand(site, "values", WIDE_VALUES, 0, counter=False),
        cuda_prefill_sm90.prefill(site) if on_sm90 else _prefill(site),
    )
    scratch = {**wide_bytes(site), **({COUNTER: 4} if on_sm90 else {})}
    return (*none, Variant(work=work, max_rows=most, scratch=scratch))


def _expand(site: Site, weight: str, buffer: str, rest: int, *, counter: bool) -> Launch:
    """Keys ([rank, nope] for each head) have `rest` columns of the latent behind them.

    Args:
        counter: the launch sets COUNTER to 0.
    """
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
        {"weight": weight, "wide": buffer, "counter": COUNTER if counter else ""},
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
    return scratch_launch(
        site,
        function,
        {**constants, **expansion_constants(site)},
        grid,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        scratch=buffer_types(site),
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
