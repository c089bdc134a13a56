"""moe in five launches without host synchronisation, or six; grids cover the most blocks of a
bucket.

    route     a program a pair of a row and one of its experts, or a row's pairs: which expert, with
              what share of the result, and the row as that expert multiplies it (scaled and
              quantised)
    gather    a program an expert: the pairs that chose it, in order
    gate_up   a program a block of an expert's pairs and some columns: both products, or up's,
              activation(gate) * up or activation(up), scaled and quantised for down
    round     a program a pair: its quantisation for down, where its scales follow from all of it
    down      the same for the last product
    combine   a program some columns of a row: its experts' results in the order of their ranks,
              a shared expert's and the residual

On sm_90 both products of E2M1 weights are those of e2m1_sm90.py, e2m1_tiles_sm90.py and
e2m1_wide_sm90.py, by the rows of an expert; all else is Triton's.

Blocks are numbered expert after expert; a program finds its own from the experts' counts. With few
rows a block is one pair (`gather` is left out). Only experts that were chosen are read.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import triton

from trtc.plugins.gemm.triton.weights import e2m1_constants, weight_constants
from trtc.plugins.gpu.lowering import ONE, Extent, Grid, Launch, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton_launch import (
    count_index,
    power_of_two,
    row_block,
    row_warps,
    scales_of_row,
    vector,
)
from trtc.plugins.moe.e2m1_sm90 import Cut, Pairs
from trtc.plugins.moe.e2m1_tiles_sm90 import TiledCut
from trtc.plugins.moe.e2m1_wide_sm90 import WideCut
from trtc.plugins.moe.triton import combine, down, gate_up, gather, round_rows, route
from trtc.protos.dtypes import DTYPES
from trtc.protos.errors import UnsupportedError

PAIR_ROWS = 4
"""Up to so many rows a block is one pair: rarely do two rows choose one expert."""
_MANY_ROWS = 1024
"""From so many on a program routes a row, not a pair: there are enough."""
_ANY = 1 << 30
_DYNAMIC = "dynamic_"
"""Begins the names of roundings whose scales follow from what is rounded."""
_E2M1 = 0
"""Key of the tiles of E2M1 weights, whose channels are not summed group by group."""
_Cut = Cut | TiledCut | WideCut
Way = TypeVar("Way")
_CUTS: tuple[tuple[int, _Cut], ...] = ((4, Cut()), (96, TiledCut()), (_ANY, WideCut()))
"""Pairs an expert on average at most -> how the kernels of sm_90 divide the products of E2M1
weights, where they are the fastest: on an H200 with gpt-oss-20b's experts."""
_GATHER_BLOCK = 1024
_COLUMNS_BLOCK = 1024


@dataclass(frozen=True)
class Tile:
    """What a program of the two products takes at once."""

    block_m: int
    gate_columns: int
    """Of gate, and as many of up; twice as many of up alone."""
    down_columns: int
    depth_bytes: int
    """Of a row of x; groups of channels may be shorter."""
    num_warps: int
    num_stages: int
    weights_first: bool = False
    """Weights are the first operand, which WGMMA takes from registers: what is converted does not
    pass through shared memory."""


_TILES: Mapping[int, tuple[tuple[int, Tile], ...]] = {
    4: (
        (PAIR_ROWS, Tile(16, 16, 32, 256, 4, 4)),
        (256, Tile(16, 64, 128, 128, 4, 4)),
        (_ANY, Tile(64, 64, 128, 128, 4, 3)),
    ),
    8: (
        (PAIR_ROWS, Tile(16, 16, 16, 256, 2, 4)),
        (64, Tile(16, 32, 64, 256, 4, 3)),
        (256, Tile(32, 64, 128, 128, 4, 3)),
        (_ANY, Tile(64, 64, 128, 128, 4, 3)),
    ),
    16: (
        (PAIR_ROWS, Tile(16, 16, 16, 256, 2, 4)),
        (64, Tile(16, 32, 64, 256, 4, 3)),
        (1024, Tile(64, 64, 128, 128, 4, 3)),
        (_ANY, Tile(128, 64, 128, 128, 8, 3)),
    ),
    _E2M1: (
        (PAIR_ROWS, Tile(16, 32, 64, 256, 4, 4, weights_first=True)),
        (160, Tile(16, 32, 64, 256, 4, 4, weights_first=True)),
        (1024, Tile(64, 64, 128, 128, 4, 4)),
        (2048, Tile(128, 64, 128, 128, 4, 3)),
        (_ANY, Tile(256, 64, 128, 128, 8, 3, weights_first=True)),
    ),
    32: ((PAIR_ROWS, Tile(16, 16, 32, 128, 4, 2)), (_ANY, Tile(32, 32, 64, 128, 4, 2))),
}
"""Bits of a weight -> (rows of a bucket at most, the fastest of those tried: on an H200 with 128
experts of 768 by 2048; of E2M1 on an H100 with gpt-oss-20b's 32 of 2880 by 2880)."""
_PAIRS_OF_E4M3: tuple[tuple[int, Tile], ...] = (
    (3, Tile(16, 32, 64, 256, 4, 3)),
    (12, Tile(16, 64, 128, 128, 4, 4, weights_first=True)),
    (32, Tile(32, 64, 128, 128, 4, 3, weights_first=True)),
    (_ANY, Tile(64, 64, 128, 128, 4, 3)),
)
"""Pairs an expert on average at most -> tile of E4M3 products. gate_up + down in microseconds, each
alone, by the first to the last of these, x being the first operand (H200). With the weights as the
first one steps of 64 to 256 rows are 1% to 5% shorter:

| experts, rows of a step | 64 | 128 | 256 | 512 |
|---|---|---|---|---|
| 256 of 512 by 2048, | 114 + 72 | 126 + 81 | 131 + 88 | 150 + 113 |
| 8 a row | 119 + 66 | 129 + 75 | 134 + 78 | 148 + 94 |
| | 124 + 77 | 137 + 87 | 141 + 90 | 145 + 94 |
| | 124 + 89 | 138 + 99 | 143 + 104 | 145 + 108 |
| 64 of 1408 by 2048, | 98 + 57 | 100 + 61 | 131 + 78 | 206 + 120 |
| 6 a row | 96 + 55 | 100 + 57 | | |
| | 103 + 59 | 105 + 60 | 105 + 60 | 145 + 83 |
| | 101 + 59 | 103 + 62 | 103 + 63 | 104 + 67 |
"""


def lower(site: Site) -> tuple[Variant, ...]:
    """Variants by ascending rows.

    Raises:
        UnsupportedError: activations that only the CPU target rounds so, or in groups that a
            program cannot tell apart.
    """
    quant, weight = (str(site.attributes[name]) for name in ("act_quant", "weight_dtype"))
    if quant.startswith(_DYNAMIC) and quant.removeprefix(_DYNAMIC) != weight:
        raise UnsupportedError(f"kernels for a GPU do not multiply {weight} so", field="act_quant")
    most = site.limits.max_num_tokens
    variants: list[Variant] = []
    ways: tuple[tuple[int, Tile | _Cut], ...] = (*_cuts(site), *_tiles(site))
    for rows, tile in ways:
        last = variants[-1].max_rows if variants else 0
        if last < min(rows, most):
            variants.append(variant_of(site, min(rows, most), tile))
    return tuple(variants)


def _tiles(site: Site) -> tuple[tuple[int, Tile], ...]:
    """With the rows of a bucket at most."""
    weight = str(site.attributes["weight_dtype"])
    tiles = _TILES[_E2M1 if weight == "f4e2m1" else _bits_of(weight)]
    if not weight == str(site.attributes["act_quant"]).removeprefix(_DYNAMIC) == "f8e4m3":
        return tiles
    return (tiles[0], *_by_rows(site, _PAIRS_OF_E4M3))


def _by_rows(site: Site, ways: Iterable[tuple[int, Way]]) -> Iterator[tuple[int, Way]]:
    """The rows of a bucket that have so many pairs an expert on average."""
    for pairs, way in ways:
        yield pairs * site.axes["E"] // int(site.attributes["top_k"]), way


def _cuts(site: Site) -> tuple[tuple[int, _Cut], ...]:
    """Those of _CUTS with the rows of a bucket at most, if all of them take the site."""
    cuts = ((PAIR_ROWS, _CUTS[0][1]), *_by_rows(site, _CUTS))
    return cuts if all(cut.takes(site, _Call(site, rows, cut).places) for rows, cut in cuts) else ()


def _bits_of(weight: str) -> int:
    """Of a code of a weight type. Tiles of 6 bits are as those of 8."""
    return {"iq4": 4, "i6": 8}.get(weight) or DTYPES[weight].bits


def variant_of(site: Site, rows: int, tile: Tile | _Cut) -> Variant:
    """The launches for buckets of up to `rows` rows; a block is one pair up to PAIR_ROWS."""
    call = _Call(site, rows, tile)
    gathers = () if call.in_pairs else (call.gather(),)
    return Variant(
        work=(
            call.route(),
            *gathers,
            *call.gate_up(),
            *((call.round(),) if call.is_dynamic else ()),
            *call.down(),
            call.combine(),
        ),
        max_rows=rows,
        scratch={
            name: DTYPES[dtype].num_bytes(count) for name, (dtype, count) in call.buffers.items()
        },
    )


@dataclass(frozen=True)
class _Call:
    """One variant of a site, launch by launch."""

    site: Site
    rows: int
    tile: Tile | _Cut

    @property
    def in_pairs(self) -> bool:
        return self.rows <= PAIR_ROWS

    @property
    def pairs(self) -> int:
        return self.rows * self.top_k

    @property
    def top_k(self) -> int:
        return int(self.site.attributes["top_k"])

    @property
    def given_dtype(self) -> str:
        """What experts multiply their inputs as."""
        quant = str(self.site.attributes["act_quant"])
        return self.site.dtypes["x"] if quant == "none" else quant.removeprefix(_DYNAMIC)

    @property
    def is_dynamic(self) -> bool:
        """Whether the scales of what is multiplied follow from it."""
        return str(self.site.attributes["act_quant"]).startswith(_DYNAMIC)

    def scales(self, depth: int) -> int:
        """Of a row of `depth` channels; 0: rows have none of their own."""
        if not self.is_dynamic:
            return 0
        group = int(self.site.attributes["group_size"])
        return scales_of_row(depth, depth // group if group else 1)

    @property
    def is_rewritten(self) -> bool:
        """Whether every expert has its own version of x, in the buffer `given`."""
        own = any(self.site.has(f"gate_up_{what}") for what in ("pre_scale", "order"))
        return own or self.weighs_inputs or self.site.attributes["act_quant"] != "none"

    @property
    def weighs_inputs(self) -> bool:
        return bool(self.site.attributes["weighs_inputs"])

    @property
    def buffers(self) -> dict[str, tuple[str, int]]:
        """Scratch: element type and count."""
        axes = self.site.axes
        hidden, inner, num_experts = axes["H"], axes["I"], axes["L"]
        found = {
            "experts": ("i32", self.pairs),
            "shares": ("f32", self.pairs),
            "hidden": (self.given_dtype, self.pairs * inner),
            "results": ("f32", self.pairs * hidden),
        }
        if self.is_rewritten:
            found["given"] = (self.given_dtype, self.pairs * hidden)
        if self.is_dynamic:
            found["active"] = (self.site.dtypes["x"], self.pairs * inner)
            found["given_scale"] = ("f32", self.pairs * self.scales(hidden))
            found["hidden_scale"] = ("f32", self.pairs * self.scales(inner))
        if not self.in_pairs:
            found["counts"] = ("i32", num_experts)
            found["members"] = ("i32", num_experts * self.capacity)
        if not isinstance(self.tile, Tile):
            found |= self.tile.buffers(self.site, self.places)
        return found

    @property
    def capacity(self) -> int:
        """Pairs that an expert may have: of all variants, so that they share their kernels."""
        return self.site.limits.max_num_tokens

    def route(self) -> Launch:
        hidden = self.site.axes["H"]
        unused = ("given", "gate_up_pre_scale", "gate_up_input_scale", "gate_up_order")
        pairs = self.top_k if self.rows >= _MANY_ROWS else 1
        # Where scales follow from a row, a program has all of it at once.
        block = row_block(hidden) if self.is_dynamic else min(_COLUMNS_BLOCK, power_of_two(hidden))
        warps = row_warps(block) if self.is_dynamic else 4
        launch = self._launch(
            route,
            {
                **self._routing("E"),
                "TOP_PAD": max(2, power_of_two(self.top_k)),
                "PAIRS": pairs,
                "SIGMOID": self.site.attributes["score"] == "sigmoid",
                "SPARSEMIXER": self.site.attributes["score"] == "sparsemixer",
                "MARGIN": float(self.site.attributes["margin"]),
                "NUM_GROUPS": int(self.site.attributes["num_groups"]),
                "TOP_GROUPS": int(self.site.attributes["top_groups"]),
                "TOP2_SUM": self.site.attributes["group_score"] == "top2_sum",
                "RENORMALIZE": bool(self.site.attributes["renormalize"]),
                "EPSILON": float(self.site.attributes["epsilon"]),
                "SCALE": float(self.site.attributes["scale"]),
                "WEIGHS_INPUTS": self.weighs_inputs,
                "DEPTH": hidden,
                "SCALES": self.scales(hidden),
                "HADAMARD": int(self.site.attributes["hadamard"]),
                "BLOCK": block,
                "LOGITS_STRIDE": self.site.strides["router_logits"],
                "X_STRIDE": self.site.strides["x"],
            },
            (Extent(self.site.rows, times=self.top_k // pairs), ONE, ONE),
            num_warps=warps if self.is_rewritten else 1,
            renamed={} if self.is_rewritten else dict.fromkeys(unused, ""),
        )
        return replace(launch, may_wait_last=True)

    def gather(self) -> Launch:
        return self._launch(
            gather,
            {
                "COUNT": count_index(self.site.rows),
                "TOP_K": self.top_k,
                "CAPACITY": self.capacity,
                "BLOCK": _GATHER_BLOCK,
            },
            (Extent(times=self.site.axes["L"]), ONE, ONE),
            num_warps=4,
        )

    @property
    def places(self) -> Pairs:
        return Pairs(self.pairs, self.capacity, in_blocks=not self.in_pairs)

    def gate_up(self) -> tuple[Launch, ...]:
        if not isinstance(self.tile, Tile):
            return self.tile.launches(self.site, "gate_up", self.places)
        inner, hidden = self.site.axes["I"], self.site.axes["H"]
        parts = int(self.site.attributes["parts"])
        columns = 2 * self.tile.gate_columns // parts
        launch = self._launch(
            gate_up,
            {
                **self._product(self.tile),
                "SCALES": self.scales(hidden),
                "ROWS_OF_PAIRS": 1 if self.is_rewritten else self.top_k,
                "DEPTH": hidden,
                "COLUMNS": inner,
                "GIVEN_STRIDE": hidden if self.is_rewritten else self.site.strides["x"],
                "PARTS": parts,
                "THROUGH_BF16": self.site.dtypes["x"] == "bf16",
                "GELU_TANH": self.site.attributes["activation"] == "gelu_tanh",
                "QUICK_GELU": self.site.attributes["activation"] == "quick_gelu",
                "RELU2": self.site.attributes["activation"] == "relu2",
                "LIMIT": float(self.site.attributes["limit"]),
                "UP_OFFSET": float(self.site.attributes["up_offset"]),
                "BLOCK_N": columns,
            },
            self._blocks(self.tile, triton.cdiv(inner, columns)),
            num_warps=self.tile.num_warps,
            renamed=self._gate_up_names(),
        )
        return (launch,)

    def _gate_up_names(self) -> dict[str, str]:
        if self.is_dynamic:
            return {"hidden": "active"}
        return {} if self.is_rewritten else {"given": "x"}

    def round(self) -> Launch:
        inner = self.site.axes["I"]
        block = row_block(inner)
        return self._launch(
            round_rows,
            {
                "COUNT": count_index(self.site.rows),
                "TOP_K": self.top_k,
                "COLUMNS": inner,
                "SCALES": self.scales(inner),
                "HADAMARD": int(self.site.attributes["hadamard"]),
                "BLOCK": block,
            },
            (Extent(self.site.rows, times=self.top_k), ONE, ONE),
            num_warps=row_warps(block),
        )

    def down(self) -> tuple[Launch, ...]:
        if not isinstance(self.tile, Tile):
            return self.tile.launches(self.site, "down", self.places)
        inner, hidden = self.site.axes["I"], self.site.axes["H"]
        launch = self._launch(
            down,
            {
                **self._product(self.tile),
                "SCALES": self.scales(inner),
                "DEPTH": inner,
                "COLUMNS": hidden,
                "BLOCK_N": self.tile.down_columns,
            },
            self._blocks(self.tile, triton.cdiv(hidden, self.tile.down_columns)),
            num_warps=self.tile.num_warps,
        )
        return (launch,)

    def combine(self) -> Launch:
        hidden = self.site.axes["H"]
        block = min(_COLUMNS_BLOCK, power_of_two(hidden))
        return self._launch(
            combine,
            {
                "COUNT": count_index(self.site.rows),
                "TOP_K": self.top_k,
                "COLUMNS": hidden,
                "SHARED_STRIDE": self.site.strides.get("shared", 0),
                "SHARED_GATE_STRIDE": self.site.strides.get("shared_gate", 0),
                "RESIDUAL_STRIDE": self.site.strides.get("residual", 0),
                "OUT_STRIDE": self.site.strides["out"],
                "BLOCK": block,
                "VECTOR": vector("f32"),
            },
            (Extent(self.site.rows, times=triton.cdiv(hidden, block)), ONE, ONE),
            num_warps=4,
            renamed={} if self.site.has("expert_map") else {"experts": ""},
        )

    def _routing(self, experts: str) -> dict[str, Any]:
        """Of the experts of an axis: all of the router's, or those that are here."""
        num_experts = self.site.axes[experts]
        return {
            "COUNT": count_index(self.site.rows),
            "NUM_EXPERTS": num_experts,
            "EXPERTS_PAD": power_of_two(num_experts),
            "TOP_K": self.top_k,
        }

    def _product(self, tile: Tile) -> dict[str, Any]:
        """What the two products have in common; see plugins/gemm/triton/weights.py."""
        channels = tile.depth_bytes * 8 // DTYPES[self.given_dtype].bits
        attributes, has_unit = self.site.attributes, self.site.has("gate_up_scale_unit")
        is_e2m1 = attributes["weight_dtype"] == "f4e2m1"
        constants_of = e2m1_constants if is_e2m1 else weight_constants
        return {
            **self._routing("L"),
            "CAPACITY": self.capacity,
            **constants_of(attributes, channels, has_unit=has_unit),
            "E2M1": is_e2m1,
            "BLOCK_M": tile.block_m,
            "WEIGHTS_FIRST": tile.weights_first,
            "STAGES": tile.num_stages if self.site.arch.has_large_shared else 2,
        }

    def _blocks(self, tile: Tile, programs: int) -> Grid:
        """Programs a block, for as many blocks as the pairs may fall into at most."""
        if self.in_pairs:
            return (Extent(times=programs), Extent(self.site.rows, times=self.top_k), ONE)
        blocks = self.pairs // tile.block_m + min(self.site.axes["L"], self.pairs)
        return (Extent(times=programs), Extent(times=blocks), ONE)

    def _launch(
        self,
        function: Any,
        constants: Mapping[str, int | float | bool | str],
        grid: Grid,
        *,
        num_warps: int,
        renamed: Mapping[str, str] | None = None,
    ) -> Launch:
        # Blocks are found by counts and members, single pairs by their experts.
        found_by_block = function in (gate_up, down) and not self.in_pairs
        unused = ["counts", "members"] if self.in_pairs else ["experts"] * found_by_block
        return scratch_launch(
            self.site,
            function,
            constants,
            grid,
            num_warps=num_warps,
            scratch={name: dtype for name, (dtype, _) in self.buffers.items()},
            renamed={**dict.fromkeys(unused, ""), **(renamed or {})},
        )
