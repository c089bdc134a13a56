"""The products of experts with E2M1 weights for some rows of each, on sm_90
(e2m1_operand_sm90.cu, e2m1_tiles_sm90.cu)."""

from collections.abc import Mapping
from dataclasses import dataclass

from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.concurrent import releasing_late
from trtc.plugins.gpu.lowering import ONE, SCRATCH, Extent, Launch, Site, TileMap
from trtc.plugins.gpu.sources import CudaSource, KernelParameter
from trtc.plugins.moe.e2m1_sm90 import (
    CHUNK_BYTES,
    CHUNK_CHANNELS,
    GROUP,
    PAIR_LISTS,
    Pairs,
    Product,
    bias_argument,
    given_argument,
    given_constants,
    is_plain,
    product_constants,
    product_launch,
    sizes,
)

_BLOCK_ROWS = 64
"""Rows of an expert that are multiplied at once, at most."""
_MOST_OPERAND_WARPS = 8
"""Of a thread block that makes a row of an operand, a group of channels a thread."""
_TEAM_THREADS = 128
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 32, 160
_MOST_STAGES, _LEAST_STAGES = 4, 3
_OPERAND, _X_SCALE = "operand", "x_scale"


@dataclass(frozen=True)
class TiledCut:
    """How the kernels divide a product: a thread block has `teams` times 64 rows of the weight."""

    teams: int = 3

    def takes(self, site: Site, pairs: Pairs) -> bool:
        """Whether both products are in whole groups and rows of the weight's map, with stages that
        fit into shared memory."""
        hidden, inner = site.axes["H"], site.axes["I"]
        return (
            is_plain(site)
            and hidden % GROUP == 0
            and inner % GROUP == 0
            and self._stages(site) >= _LEAST_STAGES
        )

    def buffers(self, site: Site, pairs: Pairs) -> Mapping[str, tuple[str, int]]:
        """Scratch beside that of every tile: element type and count."""
        blocks = pairs.most // _BLOCK_ROWS + min(site.axes["L"], pairs.most)  # at most
        rows = blocks * _BLOCK_ROWS
        return {
            _OPERAND: ("u8", rows * 2 * max(site.axes["H"], site.axes["I"])),
            _X_SCALE: ("f32", rows),
        }

    def launches(self, site: Site, product: Product, pairs: Pairs) -> tuple[Launch, ...]:
        """The operand, then the product with it, each of which lets the next one find its pairs
        while it runs."""
        operand = _operand(site, product, pairs)
        return releasing_late(operand), releasing_late(self._product(site, product, pairs))

    def _product(self, site: Site, product: Product, pairs: Pairs) -> Launch:
        stages = self._stages(site)
        return tiles_launch(
            site,
            product,
            pairs,
            kind="tiles",
            operand={
                _OPERAND: (SCRATCH + _OPERAND, "u8"),
                _X_SCALE: (SCRATCH + _X_SCALE, "f32"),
            },
            teams=self.teams,
            shared_bytes=self._shared_bytes(site, stages),
            constants={
                "BLOCK_ROWS": _BLOCK_ROWS,
                "STAGES": stages,
                "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
                "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
            },
        )

    def _stages(self, site: Site) -> int:
        most = ARCHS[site.sm].shared_bytes
        fitting = (
            stages
            for stages in range(_MOST_STAGES, 0, -1)
            if self._shared_bytes(site, stages) <= most
        )
        return next(fitting, 0)

    def _shared_bytes(self, site: Site, stages: int) -> int:
        """Of `Shared` in e2m1_tiles_sm90.cu."""
        weights = self.teams * 64 * CHUNK_BYTES
        operand = 2 * CHUNK_CHANNELS * _BLOCK_ROWS
        costs = 4 * site.axes["L"]
        return stages * (weights + operand + 2 * 8) + -(-(list_bytes(site) + costs) // 8) * 8


def tiles_launch(
    site: Site,
    product: Product,
    pairs: Pairs,
    *,
    kind: str,
    operand: Mapping[str, tuple[str, str]],
    teams: int,
    shared_bytes: int,
    constants: Mapping[str, int | float | str],
) -> Launch:
    """A launch of a kernel whose blocks take items (e2m1_items_sm90.cuh).

    Args:
        kind: which: its file is e2m1_{kind}_sm90.cu.
        operand: its first parameters: what each is, and its type.
        teams: warpgroups that multiply, beside one that copies.
        constants: macros that other kernels do not have.
    """
    return product_launch(
        site,
        product,
        {
            **operand,
            "scale": (f"{product}_scale", "u8"),
            **bias_argument(site, product),
            **PAIR_LISTS,
        },
        CudaSource(
            file=f"moe/e2m1_{kind}_sm90.cu",
            entry=f"experts_e2m1_{kind}",
            parameters=(),
            constants={
                **product_constants(site, product, pairs),
                "TEAMS": teams,
                "SHARED_BYTES": shared_bytes,
                **constants,
            },
            num_threads=(teams + 1) * _TEAM_THREADS,
            shared_bytes=shared_bytes,
        ),
        _weight_map(site, product, teams),
    )


def _weight_map(site: Site, product: Product, teams: int) -> TileMap:
    """Of gate and up, eight rows of gate and the same of up; of down sixteen rows. A tile has
    those of all warps of the teams."""
    gated, depth, columns = sizes(site, product)
    row, experts, warps = depth // 2, site.axes["L"], 4 * teams
    if gated:
        beside, step = columns * row, 8 * row
        # What begins after the last gate would end after the last up.
        count = (2 * experts - 1) * columns // 8
    else:
        beside, step = 8 * row, 16 * row
        count = experts * columns // 16
    return TileMap(
        parameter=product,
        sizes=(row, 8, 2, count),
        strides=(row, beside, step),
        box=(CHUNK_BYTES, 8, 2, warps),
    )


def _operand(site: Site, product: Product, pairs: Pairs) -> Launch:
    depth = sizes(site, product)[1]
    warps = min(-(-depth // GROUP // 32), _MOST_OPERAND_WARPS)
    shared_bytes = list_bytes(site) + 4 * site.axes["L"] + 4 * warps
    arguments = {
        **given_argument(product),
        **PAIR_LISTS,
        _OPERAND: (SCRATCH + _OPERAND, "u8"),
        _X_SCALE: (SCRATCH + _X_SCALE, "f32"),
    }
    kernel = CudaSource(
        file="moe/e2m1_operand_sm90.cu",
        entry="operand_e2m1",
        parameters=tuple(KernelParameter(name, dtype) for name, (_, dtype) in arguments.items()),
        constants={
            "K": depth,
            "NUM_EXPERTS": site.axes["L"],
            "CAPACITY": pairs.capacity,
            "BLOCK_ROWS": _BLOCK_ROWS,
            "WARPS": warps,
            "SHARED_BYTES": shared_bytes,
            "PAIRS_KNOWN": int(product == "down"),
            **given_constants(site, product),
        },
        num_threads=warps * 32,
        shared_bytes=shared_bytes,
    )
    return Launch(
        kernel=kernel,
        arguments=tuple(name for name, _ in arguments.values()),
        grid=(Extent(site.rows, times=int(site.attributes["top_k"])), ONE, ONE),
        overlaps=site.arch.has_pdl,
    )


def list_bytes(site: Site) -> int:
    """Of `BlockList`."""
    return 4 * (site.axes["L"] + 1)
