"""The kernel for 16 to 256 rows on sm_90 (streamed.cu): tactics for each site, as measured."""

from collections.abc import Mapping
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
from trtc.plugins.gpu.arch import SM_90
from trtc.plugins.gpu.lowering import DIMS, ONE, Extent, Launch, Site, TileMap
from trtc.plugins.gpu.sources import CudaSource, KernelParameter
from trtc.protos.dtypes import DTYPES

_SEGMENT_BYTES = 128
_CHUNK_BYTES = 16
_DEEP_BYTES = 8192
"""Of a row of the weight, from which on _ROW_SCALE_CUTS are taken."""
_COPY_THREADS = 64
"""Of two warps; with more than 128 rows all four of a group, which then hand on registers."""
_HANDING_ON_ROWS = 128
_LEAST_OWNED = 8
"""Rows of x whose sums a team adds up."""
INTERLEAVED = 16
"""Rows of the weight that the order in shared memory is of."""


@dataclass(frozen=True)
class Cut:
    """How a product of up to `rows` rows is divided, in the words of streamed.cu."""

    rows: int
    row_groups: int
    stages: int
    x_stages: int
    teams: int = 1
    splits: int = 1
    run: int = 1

    @property
    def tile_rows(self) -> int:
        return GROUP_ROWS * self.row_groups

    @property
    def num_threads(self) -> int:
        multiplying = self.teams * self.row_groups * GROUP_THREADS
        hands_on = self.rows > _HANDING_ON_ROWS and multiplying > GROUP_THREADS
        return multiplying + (GROUP_THREADS if hands_on else _COPY_THREADS)

    def shared_bytes(self, beside: int) -> int:
        """Both rings, two barriers a stage and what lies beside them, in whole kilobytes."""
        rings = (self.stages * self.tile_rows + self.x_stages * self.rows) * _SEGMENT_BYTES
        return -(-(rings + 16 * (self.stages + self.x_stages) + beside) // 1024) * 1024

    @property
    def weight_box(self) -> tuple[int, ...]:
        """Of a map whose second and third dimensions are the order of rows in a stage."""
        return (_SEGMENT_BYTES, 8, 2, 1, self.tile_rows // INTERLEAVED)

    def clusters(self, columns: int) -> int:
        """So many that all have the same number of tiles, or nearly."""
        return even_clusters(-(-columns // self.tile_rows), SM_90.multiprocessors // self.splits)


CUTS: Mapping[tuple[str, str], tuple[Cut, ...]] = {
    ("f8e4m3", "narrow"): (
        Cut(32, 1, stages=16, x_stages=12, teams=2, splits=2),
        Cut(64, 1, stages=10, x_stages=8, teams=2, splits=2),
        Cut(128, 1, stages=9, x_stages=8, splits=2, run=0),
    ),
    ("f8e4m3", "medium"): (
        Cut(16, 1, stages=15, x_stages=12, teams=2),
        Cut(32, 1, stages=12, x_stages=12, teams=2),
        Cut(64, 1, stages=10, x_stages=8, teams=2),
        Cut(128, 1, stages=9, x_stages=8, run=0),
    ),
    ("f8e4m3", "wide"): (
        Cut(16, 2, stages=7, x_stages=12),
        Cut(32, 2, stages=6, x_stages=12),
        Cut(64, 2, stages=5, x_stages=8),
        Cut(128, 2, stages=6, x_stages=6),
        Cut(256, 2, stages=4, x_stages=4, run=0),
    ),
    ("bf16", "narrow"): (
        Cut(32, 1, stages=16, x_stages=12, teams=2, splits=2, run=0),
        Cut(64, 1, stages=13, x_stages=12, splits=2, run=0),
        Cut(128, 1, stages=9, x_stages=8, splits=2, run=0),
    ),
    ("bf16", "medium"): (
        Cut(32, 1, stages=12, x_stages=12, teams=2, run=0),
        Cut(64, 1, stages=13, x_stages=12, teams=2, run=0),
    ),
    ("bf16", "wide"): (
        Cut(16, 2, stages=7, x_stages=12, run=0),
        Cut(32, 2, stages=6, x_stages=12, run=0),
        Cut(64, 2, stages=6, x_stages=12, run=0),
        Cut(128, 2, stages=8, x_stages=4, run=0),
    ),
}
"""By element type and shape: those that were faster than skinny.cu and cuBLASLt on an H200. In
microseconds, each product with a small dependent kernel after it, those (skinny.cu up to 64 rows,
then cuBLASLt) and streamed.cu:

| E4M3, rows | 4096 -> 6144 | 4096 -> 4096 | 14336 -> 4096 | 4096 -> 28672 |
|---|---|---|---|---|
| 16 | 8.5, 8.1 | 6.4, 6.4 | 16.7, 16.2 | 29.2, 28.4 |
| 32 | 9.2, 8.6 | 7.3, 7.0 | 18.1, 16.6 | 30.4, 28.9 |
| 64 | 11.2, 9.3 | 9.0, 7.7 | 19.3, 17.5 | 33.7, 29.6 |
| 128 | 11.8, 10.4 | 10.3, 8.7 | 24.7, 20.3 | 39.2, 33.2 |
| 256 | 14.5, 14.6 | 12.2, 12.6 | 32.7, 30.9 | 52.3, 46.0 |

| bf16, rows | 4096 -> 6144 | 4096 -> 4096 | 14336 -> 4096 | 4096 -> 28672 |
|---|---|---|---|---|
| 16 | 14.6, 14.5 | 10.7, 10.7 | 29.9, 29.8 | 57.8, 55.2 |
| 32 | 15.3, 15.0 | 11.6, 10.9 | 32.2, 29.7 | 58.6, 54.9 |
| 64 | 17.9, 15.5 | 13.0, 11.6 | 33.1, 31.4 | 61.8, 56.0 |
| 128 | 19.1, 17.1 | 15.9, 13.2 | 41.0, 36.0 | 69.6, 60.6 |
| 256 | 24.1, 25.2 | 20.3, 19.6 | 52.4, 51.9 | 97.8, 97.1 |

But 4096 -> 6144 in bf16 at 128 rows is cuBLASLt's: a step of the 8B shape took 9.10 ms with it and
9.18 with a cut that was faster alone.
"""
_ROW_SCALE_CUTS: Mapping[tuple[str, str], tuple[Cut, ...]] = {
    ("f8e4m3", "narrow"): (
        Cut(192, 1, stages=8, x_stages=5, splits=2, run=0),
        Cut(256, 1, stages=8, x_stages=4, splits=2, run=0),
    ),
}
"""More of them where each row of x has a scale, and long rows: cuBLASLt has one tactic for vectors
of scales, tiles of 128 x 128 without splits of K. 14336 -> 4096 with 256 rows takes 28 us in a step
by these, 40 by cuBLASLt; 4096 -> 4096 and 4096 -> 6144 took as long by such cuts as by it (H200).
"""


def streamed_launches(site: Site) -> dict[int, Launch]:
    """By the rows they are for at most; none where the kernel cannot run."""
    return {cut.rows: streamed_launch(site, cut) for cut in _cuts(site)}


def _cuts(site: Site) -> tuple[Cut, ...]:
    is_deep = DTYPES[site.dtypes["weight"]].num_bytes(site.axes["K"]) >= _DEEP_BYTES
    more = _ROW_SCALE_CUTS if site.has("row_scale") and is_deep else {}
    return cuts_of(site, CUTS, INTERLEAVED) + cuts_of(site, more, INTERLEAVED)


def cuts_of(
    site: Site, table: Mapping[tuple[str, str], tuple[Cut, ...]], multiple: int
) -> tuple[Cut, ...]:
    """Those of a table like CUTS that can run, if the weight has a multiple of so many rows."""
    dtype, columns = site.dtypes["weight"], site.axes["N"]
    row_bytes = DTYPES[dtype].num_bytes(site.axes["K"])
    if (
        not site.arch.has_wgmma
        or site.dtypes["x"] != dtype
        or columns % multiple
        or row_bytes % _CHUNK_BYTES
        or site.strides.get("row_scale", 1) != 1  # they are copied at once
    ):
        return ()
    segments = -(-row_bytes // _SEGMENT_BYTES)
    cuts = (
        replace(cut, splits=_splits(cut, columns, segments))
        for cut in table.get((dtype, shape(columns)), ())
    )
    return tuple(cut for cut in cuts if cut.splits * cut.teams <= segments)


def _splits(cut: Cut, columns: int, segments: int) -> int:
    """Blocks that share a tile. Of few tiles as many as have a segment for each team, and eight
    rows of x for each team to add up."""
    tiles = -(-columns // cut.tile_rows)
    if tiles > FEW_TILES:
        return cut.splits
    parts = min(segments, cut.rows // _LEAST_OWNED) // cut.teams
    return max(cut.splits, blocks_of_tile(tiles, parts))


def streamed_launch(site: Site, cut: Cut) -> Launch:
    inputs = tuple(name for name in OPTIONAL if site.has(name))
    return launch_of(site, cut, inputs, _weight_map(site, cut), float_macros(site) | {"GATED": 0})


def launch_of(
    site: Site, cut: Cut, inputs: tuple[str, ...], weight: TileMap, macros: Macros, beside: int = 0
) -> Launch:
    """One of streamed.cu.

    Args:
        inputs: its parameters before dims.
        weight: how the rows of the weight come to lie in a stage.
        macros: those that `cut` does not give.
        beside: bytes of shared memory beside the rings and the scales of rows.
    """
    clusters = cut.clusters(site.axes["N"])
    arguments = (*inputs, DIMS, "out")
    maps = (_x_map(site, cut), weight)
    scales = DTYPES["f32"].num_bytes(cut.rows) if site.has("row_scale") else 0
    shared_bytes = cut.shared_bytes(scales + beside)
    constants = {
        **macros,
        "ROWS": cut.rows,
        "ROW_GROUPS": cut.row_groups,
        "TEAMS": cut.teams,
        "SPLITS": cut.splits,
        "CLUSTER": cut.splits,
        "CLUSTERS": clusters,
        "STAGES": cut.stages,
        "X_STAGES": cut.x_stages,
        "RUN": cut.run,
        "SCALE_BYTES": _scale_bytes(site, cut),
        "SHARED_BYTES": shared_bytes,
    }
    parameters = (*arguments, *(one.parameter for one in maps))
    return Launch(
        kernel=CudaSource(
            file="gemm/streamed.cu",
            entry="streamed_linear",
            parameters=tuple(
                KernelParameter(name, site.dtypes.get(name, "i32")) for name in parameters
            ),
            constants=constants,
            num_threads=cut.num_threads,
            shared_bytes=shared_bytes,
        ),
        arguments=arguments,
        grid=(Extent(times=clusters * cut.splits), ONE, ONE),
        overlaps=True,
        may_wait_last=True,
        maps=maps,
    )


def _room(site: Site, cut: Cut) -> int:
    """Rows of x that are copied."""
    limits = site.limits
    return min(cut.rows, limits.max_batch_size if site.rows == "rows" else limits.max_num_tokens)


def _scale_bytes(site: Site, cut: Cut) -> int:
    """Of the scales of these rows: whole chunks, as buffers have them."""
    if not site.has("row_scale"):
        return 0
    return -(-DTYPES["f32"].num_bytes(_room(site, cut)) // _CHUNK_BYTES) * _CHUNK_BYTES


def _x_map(site: Site, cut: Cut) -> TileMap:
    """Rows beyond those that there is room for are zeros."""
    x = DTYPES[site.dtypes["x"]]
    return TileMap(
        parameter="x",
        sizes=(x.num_bytes(site.axes["K"]), _room(site, cut)),
        strides=(x.num_bytes(site.strides["x"]),),
        box=(_SEGMENT_BYTES, cut.rows),
    )


def _weight_map(site: Site, cut: Cut) -> TileMap:
    """Row 16 a + 2 r + b of the weight is at (r, b, 0, a), and copied in that order, r fastest."""
    row = DTYPES[site.dtypes["weight"]].num_bytes(site.axes["K"])
    sixteen = INTERLEAVED * row
    return TileMap(
        parameter="weight",
        sizes=(row, 8, 2, 1, site.axes["N"] // INTERLEAVED),
        strides=(2 * row, row, sixteen, sixteen),
        box=cut.weight_box,
    )
