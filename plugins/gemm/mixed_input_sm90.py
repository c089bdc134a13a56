"""Integer weights by WGMMA (mixed_input_sm90.cu): tactics for each site, as measured."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from trtc.plugins.gemm.mixed_input_tactics import Weight
from trtc.plugins.gemm.tiling import GROUP_ROWS, GROUP_THREADS, even_clusters, integer_macros, shape
from trtc.plugins.gpu.arch import SM_90
from trtc.plugins.gpu.lowering import DIMS, ONE, Extent, Launch, Site, Variant
from trtc.plugins.gpu.sources import CudaSource, KernelParameter
from trtc.plugins.tiles import CHANNELS

_PRODUCERS = 128
_BARRIER_BYTES = 16
"""Of a stage."""
_PANEL_ALIGNMENT = 1024
_MIN_STAGES, _MAX_STAGES = 2, 8
"""Of a team."""
_MOST_ROWS, _MOST_GROUPS = 128, 4
_PARAMETERS = ("x", "weight", "weight_scale", "weight_zero", "scale_unit", "bias", "residual")
"""Before dims and out."""


@dataclass(frozen=True)
class Cut:
    """How a product is divided, in the words of mixed_input_sm90.cu."""

    rows: int
    """Of x, that an item has."""
    row_groups: int = 4
    teams: int = 1
    cluster: int = 1
    row_blocks: int = 1
    """Items of a tile."""

    @property
    def tile_rows(self) -> int:
        return GROUP_ROWS * self.row_groups

    @property
    def num_threads(self) -> int:
        return _PRODUCERS + self.teams * self.row_groups * GROUP_THREADS

    @property
    def max_rows(self) -> int:
        return self.rows * self.row_blocks

    def stage_bytes(self, weight: Weight) -> int:
        """128 channels of x and of a tile, with its scales and zero points."""
        groups = max(1, CHANNELS // weight.group_size)
        row = CHANNELS * weight.bits // 8 + groups * weight.group_bytes
        stage = self.rows * 2 * CHANNELS + self.tile_rows * row
        return _aligned(stage)

    def part_bytes(self) -> int:
        """Of the sums, that the teams of a block leave where the rings were."""
        is_split = self.teams * self.cluster > 1
        return self.teams * self.rows * (self.tile_rows + 4) * 4 if is_split else 0

    def stages(self, weight: Weight) -> int:
        """As many as there is room for, up to what a team has to read."""
        room = (SM_90.shared_bytes - _PANEL_ALIGNMENT) // self.stage_bytes(weight)
        return min(room, _MAX_STAGES * self.teams)

    def shared_bytes(self, weight: Weight) -> int:
        stages = self.stages(weight)
        ring = max(stages * self.stage_bytes(weight), self.part_bytes())
        barriers = stages * _BARRIER_BYTES
        return _aligned(ring + barriers)

    def clusters(self, columns: int) -> int:
        """One an item where K is split; else so many that all have as many items, or nearly."""
        items = -(-columns // self.tile_rows) * self.row_blocks
        if self.teams * self.cluster > 1:
            return items
        return even_clusters(items, SM_90.multiprocessors)


_CUTS: Mapping[tuple[str, int], tuple[Cut, ...]] = {
    ("narrow", 4): (
        Cut(16, 1, 4, 2),
        Cut(32, 1, 3, 2),
        Cut(64, 1, 3, 2),
        Cut(128, 1, 2, 2),
        Cut(128, 2, 1, 2, 2),
    ),
    ("medium", 4): (
        Cut(16, 1, 4),
        Cut(32, 1, 4),
        Cut(64, 1, 3),
        Cut(64, 3, 1, 2, 2),
        Cut(128, 3, 1, 2, 2),
    ),
    ("wide", 4): (Cut(32), Cut(64), Cut(128), Cut(128, 2, row_blocks=2)),
    ("wide", 8): (Cut(16, 2), Cut(32, 2), Cut(64, 2), Cut(128), Cut(128, row_blocks=2)),
}
"""By shape and bits: the fastest of those tried on an H200, for the rows after mixed_input.cu's."""
_FEW_ROWS: Mapping[tuple[str, int], int] = {
    ("narrow", 4): 8,
    ("medium", 4): 8,
    ("wide", 4): 16,
    ("wide", 8): 8,
}
"""Up to so many mixed_input.cu is as fast, or faster."""


def cuts(weight: Weight) -> tuple[Cut, ...]:
    """By ascending rows; none where nothing was measured."""
    wanted = (_with_registers(cut, weight) for cut in _CUTS.get(_kind(weight), ()))
    return tuple(cut for cut in wanted if cut.stages(weight) >= _MIN_STAGES * cut.teams)


def _with_registers(cut: Cut, weight: Weight) -> Cut:
    """Several scales of a row at once need more registers than each of so many threads has."""
    is_full = cut.rows == _MOST_ROWS and cut.row_groups == _MOST_GROUPS
    return replace(cut, row_groups=2) if is_full and weight.group_size < CHANNELS else cut


def few_rows(weight: Weight) -> int | None:
    """Up to how many rows mixed_input.cu runs before them; None: there is nothing after it."""
    return _FEW_ROWS.get(_kind(weight))


def _kind(weight: Weight) -> tuple[str, int]:
    return shape(weight.columns), weight.bits


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _PANEL_ALIGNMENT) * _PANEL_ALIGNMENT


def cut_variants(site: Site, weight: Weight, cuts: Iterable[Cut]) -> Iterator[Variant]:
    """One launch each."""
    for cut in cuts:
        yield Variant(work=(_launch(site, weight, cut),), max_rows=cut.max_rows)


def _launch(site: Site, weight: Weight, cut: Cut) -> Launch:
    present = tuple(name for name in _PARAMETERS if site.has(name))
    arguments = (*present, DIMS, "out")
    clusters = cut.clusters(weight.columns)
    kernel = CudaSource(
        file="gemm/mixed_input_sm90.cu",
        entry="mixed_input_gemm",
        parameters=tuple(KernelParameter(name, site.dtypes.get(name, "i32")) for name in arguments),
        constants={
            **integer_macros(site, weight),
            "ROWS": cut.rows,
            "ROW_BLOCKS": cut.row_blocks,
            "ROW_GROUPS": cut.row_groups,
            "TEAMS": cut.teams,
            "STAGES": cut.stages(weight),
            "CLUSTER": cut.cluster,
            "CLUSTERS": clusters,
            "SHARED_BYTES": cut.shared_bytes(weight),
        },
        num_threads=cut.num_threads,
        shared_bytes=cut.shared_bytes(weight),
    )
    return Launch(
        kernel=kernel,
        arguments=arguments,
        grid=(Extent(times=clusters * cut.cluster), ONE, ONE),
        overlaps=True,
    )
