"""The products of experts with E2M1 weights for few rows of each, on sm_90 (e2m1_sm90.cu)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.concurrent import releasing_late
from trtc.plugins.gpu.lowering import DIMS, ONE, SCRATCH, Extent, Launch, Site, TileMap
from trtc.plugins.gpu.sources import CudaSource, KernelParameter
from trtc.plugins.gpu.triton_launch import count_index

Product = Literal["gate_up", "down"]

GROUP = 32
"""Channels that share a scale."""
CHUNK_CHANNELS = 256
CHUNK_BYTES = CHUNK_CHANNELS // 2
_BLOCK_ROWS = 8
"""Rows of an expert that are multiplied at once."""
_STEP_CHANNELS = 64
_TILE_ROWS = 64
_WARPS = 4
"""Of a team."""
_STAGE_BYTES = 16 * (CHUNK_BYTES + CHUNK_CHANNELS // GROUP) + 8
"""Of a warp: weights, scales and a barrier."""
_MOST_STAGES, _LEAST_STAGES = 6, 3
PAIR_LISTS = {name: (SCRATCH + name, "i32") for name in ("counts", "members")}
"""Arguments that say which pairs each expert has."""
_GATED_ACTIVATIONS = ("silu", "gelu_tanh", "quick_gelu")


@dataclass(frozen=True)
class Pairs:
    """Which pairs of a row and an expert there are."""

    most: int
    capacity: int
    """Pairs that an expert may have."""
    in_blocks: bool
    """Whether `counts` and `members` have each expert's; else `experts` has the expert of each."""


@dataclass(frozen=True)
class Cut:
    """How the kernel divides a product."""

    most_teams: int = 4
    """Warpgroups, which take K together."""

    def teams(self, depth: int) -> int:
        """So many have a chunk of it."""
        return min(self.most_teams, -(-depth // CHUNK_CHANNELS))

    def takes(self, site: Site, pairs: Pairs) -> bool:
        """Whether both products of a site are in whole tiles and steps, with an operand that fits
        into shared memory."""
        hidden, inner = site.axes["H"], site.axes["I"]
        return (
            is_plain(site)
            and hidden % _TILE_ROWS == 0
            and inner % _STEP_CHANNELS == 0
            and min(_stages(site, self, depth, pairs) for depth in (hidden, inner)) >= _LEAST_STAGES
        )

    def buffers(self, site: Site, pairs: Pairs) -> Mapping[str, tuple[str, int]]:
        """Scratch beside that of every tile: element type and count."""
        return {}

    def launches(self, site: Site, product: Product, pairs: Pairs) -> tuple[Launch, ...]:
        """One launch of the kernel, with as many blocks as there are multiprocessors. That of gate
        and up lets that of `down` find its pairs and copy the first weights while it ends."""
        depth = sizes(site, product)[1]
        places = PAIR_LISTS if pairs.in_blocks else {"experts": (f"{SCRATCH}experts", "i32")}
        launch = product_launch(
            site,
            product,
            {
                **given_argument(product),
                "scale": (f"{product}_scale", "u8"),
                **bias_argument(site, product),
                **places,
                DIMS: (DIMS, "i32"),
            },
            CudaSource(
                file="moe/e2m1_sm90.cu",
                entry="experts_e2m1",
                parameters=(),
                constants=_constants(site, product, self, pairs),
                num_threads=self.teams(depth) * _WARPS * 32,
                shared_bytes=_shared_bytes(
                    site, self, depth, _stages(site, self, depth, pairs), pairs
                ),
            ),
            _weight_map(site, product),
        )
        return (releasing_late(launch),)


def is_plain(site: Site) -> bool:
    """Whether experts multiply E2M1 weights with E8M0 scales by bf16 as it is given, on an SM with
    WGMMA."""
    attributes = site.attributes
    return (
        attributes["weight_dtype"] == "f4e2m1"
        and site.dtypes["gate_up_scale"] == site.dtypes["down_scale"] == "u8"
        and int(attributes["group_size"]) == GROUP
        and attributes["act_quant"] == "none"
        and attributes["activation"] in _GATED_ACTIVATIONS
        and int(attributes["parts"]) == 2
        and not attributes["weighs_inputs"]
        and not any(
            site.has(name)
            for name in (
                *("gate_up_pre_scale", "down_pre_scale", "gate_up_order"),
                *("gate_up_scale_unit", "down_scale_unit"),
            )
        )
        and site.arch.has_wgmma
        and site.dtypes["x"] == "bf16"
    )


def product_launch(
    site: Site,
    product: Product,
    arguments: Mapping[str, tuple[str, str]],
    kernel: CudaSource,
    weight: TileMap,
) -> Launch:
    """A launch of a kernel for a product, by as many blocks as there are multiprocessors.

    Args:
        arguments: what each of its parameters is, and its type; beside `out` and `map`, the last.
    """
    gated = sizes(site, product)[0]
    out = (f"{SCRATCH}{'hidden' if gated else 'results'}", "bf16" if gated else "f32")
    every = {**arguments, "out": out}
    parameters = (
        *(KernelParameter(name, dtype) for name, (_, dtype) in every.items()),
        KernelParameter("map", "u8"),
    )
    return Launch(
        kernel=replace(kernel, parameters=parameters),
        arguments=tuple(name for name, _ in every.values()),
        grid=(Extent(times=site.arch.multiprocessors), ONE, ONE),
        overlaps=site.arch.has_pdl,
        maps=(weight,),
    )


def given_argument(product: Product) -> dict[str, tuple[str, str]]:
    """What a product multiplies: rows of x, or those of the pairs after the gate."""
    return {"given": ("x" if product == "gate_up" else f"{SCRATCH}hidden", "bf16")}


def bias_argument(site: Site, product: Product) -> dict[str, tuple[str, str]]:
    bias = f"{product}_bias"
    return {"bias": (bias, "f32")} if site.has(bias) else {}


def sizes(site: Site, product: Product) -> tuple[bool, int, int]:
    """(whether gate and up are two halves of the weight, its depth, columns of the output)."""
    hidden, inner = site.axes["H"], site.axes["I"]
    return (True, hidden, inner) if product == "gate_up" else (False, inner, hidden)


def _weight_map(site: Site, product: Product) -> TileMap:
    """A tile is eight rows, and the eight that a warp has beside them: up's of gate's columns, or
    the next ones."""
    gated, depth, columns = sizes(site, product)
    row, eights = depth // 2, site.axes["L"] * columns * (2 if gated else 1) // 8
    beside = columns * row if gated else 8 * row
    return TileMap(
        parameter=product,
        sizes=(row, 8, 2, eights),
        strides=(row, beside, 8 * row),
        box=(CHUNK_BYTES, 8, 2, 1),
    )


def product_constants(site: Site, product: Product, pairs: Pairs) -> dict[str, int | float | str]:
    """Macros of every kernel for a product: its sizes, and what is done with its sums."""
    attributes = site.attributes
    gated, depth, columns = sizes(site, product)
    return {
        "N": 2 * columns if gated else columns,
        "K": depth,
        "COLUMNS": columns,
        "NUM_EXPERTS": site.axes["L"],
        "CAPACITY": pairs.capacity,
        "HAS_BIAS": int(site.has(f"{product}_bias")),
        "GATED": int(gated),
        "GELU_TANH": int(attributes["activation"] == "gelu_tanh"),
        "QUICK_GELU": int(attributes["activation"] == "quick_gelu"),
        "LIMIT": float(attributes["limit"]),
        "UP_OFFSET": float(attributes["up_offset"]),
    }


def given_constants(site: Site, product: Product) -> dict[str, int | float | str]:
    """Macros that say where a pair's row of x is."""
    gated, depth, _ = sizes(site, product)
    return {
        "ROWS_OF_PAIRS": int(site.attributes["top_k"]) if gated else 1,
        "GIVEN_STRIDE": site.strides["x"] if gated else depth,
    }


def _constants(
    site: Site, product: Product, cut: Cut, pairs: Pairs
) -> dict[str, int | float | str]:
    depth = sizes(site, product)[1]
    stages = _stages(site, cut, depth, pairs)
    return {
        **product_constants(site, product, pairs),
        **given_constants(site, product),
        "IN_PAIRS": int(not pairs.in_blocks),
        "MOST_PAIRS": pairs.most,
        "ROWS": _BLOCK_ROWS,
        "TEAMS": cut.teams(depth),
        "STAGES": stages,
        "SHARED_BYTES": _shared_bytes(site, cut, depth, stages, pairs),
        "COUNT": count_index(site.rows),
        "TOP_K": int(site.attributes["top_k"]),
    }


def _stages(site: Site, cut: Cut, depth: int, pairs: Pairs) -> int:
    """As many as there is room for beside the operand."""
    most = ARCHS[site.sm].shared_bytes
    fitting = (
        stages
        for stages in range(_MOST_STAGES, 0, -1)
        if _shared_bytes(site, cut, depth, stages, pairs) <= most
    )
    return next(fitting, 0)


def _shared_bytes(site: Site, cut: Cut, depth: int, stages: int, pairs: Pairs) -> int:
    """Of `Shared` in e2m1_sm90.cu."""
    operand = depth // GROUP * _BLOCK_ROWS * 2 * GROUP
    x_scales = -(-depth // CHUNK_CHANNELS) * _BLOCK_ROWS * 4
    rings = cut.teams(depth) * _WARPS * stages * _STAGE_BYTES
    parts = 2 * cut.teams(depth) * _BLOCK_ROWS // 2 * _WARPS * 32 * 4 + 4 * 8
    listed = site.axes["L"] if pairs.in_blocks else pairs.most
    found = 4 * (_BLOCK_ROWS + listed + 1)
    return -(-(operand + x_scales + rings + parts + found) // 8) * 8
