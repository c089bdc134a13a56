"""The kernel for few rows (skinny.cu): tactics for each site, as measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trtc.plugins.gemm.tiling import (
    FEW_TILES,
    GROUP_ROWS,
    GROUP_THREADS,
    OPTIONAL,
    Macros,
    blocks_of_tile,
    even_clusters,
    float_macros,
    shape,
)
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import DIMS, ONE, Extent, Launch, Site
from trtc.plugins.gpu.sources import CudaSource, KernelParameter
from trtc.protos.dtypes import DTYPES

_ROW_BYTES = 128
"""Of a row, that a segment has."""
_CHUNK_BYTES = 16
_MOST_STAGES = 8
_LEAD = 12
_ANY = 1 << 30
_DEEP_BYTES = 8192
_MOST_BY_ROW = 64
"""Rows of cuts whose registers hold scales of rows beside a residual."""
_HALF_IDLE_ROWS = 16
"""With so many a narrow product of long rows is left to streamed.cu's cut for 32, which has twice
as many blocks: where half of the multiprocessors are idle, the kernels around it suffer. Decode
steps of 16 sequences on an H200: with down by that cut 2.88 ms from 2.96 in fp8, 4.49 from 4.90 in
bf16; with o too 2.92 in fp8, where its rows are short, and 4.47 in bf16."""


@dataclass(frozen=True)
class Cut:
    """How a product of up to `rows` rows is divided, in the words of skinny.cu."""

    rows: int
    row_groups: int = 1
    teams: int = 4
    cluster: int = 1

    @property
    def tile_rows(self) -> int:
        return GROUP_ROWS * self.row_groups

    @property
    def num_threads(self) -> int:
        return self.teams * self.row_groups * GROUP_THREADS

    def shared_bytes(self, stages: int) -> int:
        """The rings, the sums of all teams but one and all blocks but one, and two barriers."""
        ring = self.teams * stages * (self.tile_rows + self.rows) * _ROW_BYTES
        parts = (self.teams - 1 + self.cluster - 1) * self.rows * self.tile_rows * 4
        return ring + parts + 16

    def stages(self, sm: int) -> int:
        """As many as there is room for."""
        return max(
            n for n in range(_MOST_STAGES + 1) if self.shared_bytes(n) <= ARCHS[sm].shared_bytes
        )

    def clusters(self, columns: int, sm: int) -> int:
        """So many that all have the same number of tiles, or nearly."""
        return even_clusters(
            -(-columns // self.tile_rows), ARCHS[sm].multiprocessors // self.cluster
        )


_MOST_OF_FEW_TILES = 32
"""Rows. A block reads some 45 bytes a nanosecond, so that products of few columns take as long as
one of its rows. Microseconds of one row on an H200, one block a tile | several: 2048 -> 64 in bf16
5.8 | 3.1; 2048 -> 257 in bf16 5.9 | 3.2; gate and up of 2048 -> 512 in E4M3 4.4 | 3.6; 4096 -> 2048
in E4M3 5.8 | 5.6, and 7.3 by clusters of four."""
_FEW_ROWS = (Cut(8), Cut(16), Cut(32))
_MEASURED: Mapping[int, Mapping[tuple[str, str], tuple[Cut, ...]]] = {
    90: {
        ("f8e4m3", "narrow"): (*_FEW_ROWS, Cut(64, 1, 2, 2), Cut(128, 1, 2, 2)),
        ("f8e4m3", "medium"): (*_FEW_ROWS, Cut(64, 2, 2, 2)),
        ("f8e4m3", "wide"): (*_FEW_ROWS, Cut(64, 2, 2)),
        ("bf16", "narrow"): (*_FEW_ROWS, Cut(64, 1, 2, 2)),
        ("bf16", "medium"): (*_FEW_ROWS, Cut(64, 2, 2, 2)),
        ("bf16", "wide"): (*_FEW_ROWS, Cut(64, 2, 2)),
    }
}
"""By SM, element type and shape: those that were faster than cuBLASLt, on an H200."""
_GATED_INPUTS = ("weight_scale", "input_scale", "out_scale")
_GATED_MULTIPLE = 8
"""Of columns of out: rows of gate in a tile, before those of up."""
_MOST_GATED: Mapping[str, int] = {"narrow": 16, "medium": 8, "wide": 8}
"""Rows, by shape: streamed_gated.py's are for more."""
_UNMEASURED = (8, 16)
"""Rows of cuts on other SMs: only where reading the weights must take longest."""


def skinny_launches(site: Site) -> dict[int, Launch]:
    """By the rows they are for at most; none where the kernel cannot run."""
    macros = {**float_macros(site), "GATED": 0, "HAS_OUT_SCALE": 0}
    return {cut.rows: _launch(site, cut, OPTIONAL, macros) for cut in _cuts(site)}


def gated_skinny_launches(site: Site) -> dict[int, Launch]:
    """Gate and up of a gated MLP with the activation over them, as skinny_gated.cuh says, where
    that is one launch instead of two: not where scales of rows follow from it.

    Args:
        site: gated_linear's.
    """
    if site.axes["I"] % _GATED_MULTIPLE or site.has("row_scale"):
        return {}
    macros = {
        **float_macros(replace(site, attributes={"softcap": 0.0})),
        "GATED": 1,
        "GELU_TANH": int(site.attributes["activation"] == "gelu_tanh"),
        "HAS_OUT_SCALE": int(site.has("out_scale")),
        "OUT_E4M3": int(site.dtypes["out"] == "f8e4m3"),
    }
    return {
        cut.rows: _launch(site, cut, _GATED_INPUTS, macros)
        for cut in _cuts(site)
        if cut.rows <= _MOST_GATED[shape(site.axes["N"])]
    }


def _cuts(site: Site) -> tuple[Cut, ...]:
    dtype, columns, depth = site.dtypes["weight"], site.axes["N"], site.axes["K"]
    row_bytes = DTYPES[dtype].num_bytes(depth)
    if site.dtypes["x"] != dtype or dtype not in ("bf16", "f8e4m3") or row_bytes % _CHUNK_BYTES:
        return ()
    most = _MOST_BY_ROW if site.has("row_scale") and site.has("residual") else _ANY
    measured = _MEASURED.get(site.sm)
    if measured is None:
        return tuple(
            Cut(rows, teams=4 if site.arch.has_large_shared else 2) for rows in _UNMEASURED
        )
    return tuple(
        Cut(cut.rows, cut.row_groups, cut.teams, _cluster(cut, columns, row_bytes))
        for cut in measured[dtype, shape(columns)]
        if cut.rows <= most
        and (cut.rows != _HALF_IDLE_ROWS or shape(columns) != "narrow" or row_bytes < _DEEP_BYTES)
    )


def _cluster(cut: Cut, columns: int, row_bytes: int) -> int:
    """Blocks that share a tile. Of few tiles as many as have a segment for each team; else, with 8
    rows, two pay where rows are long and more SMs get work by it."""
    tiles = -(-columns // cut.tile_rows)
    if tiles <= FEW_TILES and cut.rows <= _MOST_OF_FEW_TILES:
        return blocks_of_tile(tiles, -(-row_bytes // _ROW_BYTES) // cut.teams)
    if cut.rows > 8 or row_bytes < _DEEP_BYTES:
        return cut.cluster
    one, two = cut.clusters(columns, 90), 2 * Cut(8, cluster=2).clusters(columns, 90)
    return 2 if two > 1.1 * one else 1


def _launch(site: Site, cut: Cut, optional: Sequence[str], macros: Macros) -> Launch:
    clusters = cut.clusters(site.axes["N"], site.sm)
    stages = cut.stages(site.sm)
    arguments = ("x", "weight", *(name for name in optional if site.has(name)), DIMS, "out")
    constants = {
        **macros,
        "ROWS": cut.rows,
        "ROW_GROUPS": cut.row_groups,
        "TEAMS": cut.teams,
        "STAGES": stages,
        "CLUSTER": cut.cluster,
        "CLUSTERS": clusters,
        "LEAD": _LEAD,
        "HAS_WGMMA": int(site.arch.has_wgmma),
        "X_STRIDE": site.strides["x"],
    }
    return Launch(
        kernel=CudaSource(
            file="gemm/skinny.cu",
            entry="skinny_linear",
            parameters=tuple(
                KernelParameter(name, site.dtypes.get(name, "i32")) for name in arguments
            ),
            constants=constants,
            num_threads=cut.num_threads,
            shared_bytes=cut.shared_bytes(stages),
        ),
        arguments=arguments,
        grid=(Extent(times=clusters * cut.cluster), ONE, ONE),
        overlaps=site.arch.has_pdl,
        may_wait_last=True,
    )
