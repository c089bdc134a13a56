"""Tactics of mixed-input GEMMs: how each kernel divides its work, by rows of x, sizes and SM."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.tiles import CHANNELS, ROWS

_MAX_CLUSTER = 8
_WARPS = 16
"""Bytes in flight, per multiprocessor: about its share of bandwidth times latency."""
_MANY_ROWS, _WARPS_OF_MANY_ROWS = 32, 12
"""Rows of x from which a warp needs more registers."""
_STAGES, _MIN_STAGES = 4, 3
_FEW_ROWS = (1, 8, 16, 32)
_ANY = 1 << 30
_NORM_BYTES = 32 * 4
"""Of the squares' sums."""


@dataclass(frozen=True)
class Few:
    """How mixed_input.cu cuts a product; its macros."""

    rows: int
    """Of x at most: a power of two."""
    row_tiles: int
    row_warps: int
    splits: int
    stages: int
    cluster: int = 1
    digits: bool = False
    """Products of mixed_input_digits.cuh, for scales of 128 channels or more."""
    early: int = 0
    """Stages that a warp loads before x, which arrives after them. 0: all."""
    next_share: int = 0
    """KB of each 16 KB of the next call's weight that are brought to L2 while x is awaited."""

    @property
    def block_rows(self) -> int:
        """Rows of the weight that a cluster takes."""
        return ROWS * self.row_tiles * self.row_warps

    @property
    def num_threads(self) -> int:
        """Of a block."""
        return 32 * self.row_warps * self.splits

    def blocks(self, columns: int) -> int:
        """Of a weight with so many rows."""
        return self.cluster * -(-columns // self.block_rows)


@dataclass(frozen=True)
class More:
    """Tile of multiply_mixed_input."""

    max_rows: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Weight:
    """What mixed_input.cu multiplies with: [columns, depth], a scale every group_size."""

    columns: int
    depth: int
    group_size: int
    bits: int = 4
    has_zero: bool = False
    byte_scales: bool = False
    """Codes of iq4 or E2M1, whose scales are bytes."""
    gated: bool = False
    """Half of its rows are gate, half up, and a block takes the same of both."""
    normed: bool = False
    """Every block normalises x first."""

    @property
    def group_bytes(self) -> int:
        """Of a scale and a zero point."""
        return (1 if self.byte_scales else 4) + self.has_zero


def shared_bytes(few: Few, weight: Weight) -> int:
    """Dynamic shared memory of mixed_input.cu: sums of the norm, rings and x, then the parts of the
    sums of the products instead."""
    groups = CHANNELS // weight.group_size if weight.group_size < CHANNELS else 1
    scales = groups * weight.group_bytes
    stage = few.row_tiles * ROWS * (CHANNELS * weight.bits // 8 + scales)
    ring = few.row_warps * few.splits * few.stages * stage
    chunks = few.splits * -(-weight.depth // CHANNELS // (few.cluster * few.splits))
    if few.digits:
        x = chunks * (few.rows * 4 * CHANNELS + -(-few.rows // 2) * 48)
    else:
        x = chunks * (few.rows * 2 * CHANNELS + groups * -(-few.rows // 8) * 64)
    parts = few.splits * few.rows * (few.block_rows + 4) * 4
    return max(_NORM_BYTES * weight.normed + ring + x, parts)


def few_tactics(sm: int, weight: Weight) -> Iterator[Few]:
    """By ascending rows, as far as x fits into shared memory."""
    for rows in _FEW_ROWS:
        fitting = (_fitted(few, sm, weight) for few in _wanted(sm, weight, rows))
        few = next((few for few in fitting if few is not None), None)
        if few is not None:
            yield few


def _wanted(sm: int, weight: Weight, rows: int) -> Iterator[Few]:
    """Best first."""
    if weight.bits == 4:
        table = _MEASURED.get((sm, weight.gated), {})
        measured = table.get((weight.depth, weight.columns), {}).get(rows)
        if measured is not None and (not measured.digits or _has_digits(weight)):
            yield measured
    cut = _cut(sm, weight, rows)
    if rows == 1 and _has_digits(weight):
        yield replace(cut, digits=True, early=1)
    yield cut


def _has_digits(weight: Weight) -> bool:
    return weight.bits == 4 and weight.group_size % CHANNELS == 0


def _cut(sm: int, weight: Weight, rows: int) -> Few:
    """One block a multiprocessor if it goes evenly: every warp has one part, and none waits."""
    warps = _WARPS if rows < _MANY_ROWS else _WARPS_OF_MANY_ROWS
    # With stages of twice the bytes half as many warps have as much in flight.
    warps = warps * 4 // weight.bits
    tiles = -(-weight.columns // ROWS // ARCHS[sm].multiprocessors)
    row_warps = min(tiles, warps // 2)
    if weight.gated:
        row_warps += row_warps % 2
    splits = max(1, min(warps // row_warps, weight.depth // CHANNELS))
    return Few(rows, 1, row_warps, splits, _STAGES)


def _fitted(few: Few | None, sm: int, weight: Weight) -> Few | None:
    """The tactic, or the next one of _spread that fits into shared memory."""
    while few is not None and few.block_rows <= weight.columns:
        if shared_bytes(few, weight) <= ARCHS[sm].shared_bytes:
            return few
        few = _spread(few, sm)
    return None


def _spread(few: Few, sm: int) -> Few | None:
    """The same in less shared memory: fewer stages, then K over a larger cluster or fewer warps."""
    if few.stages > _MIN_STAGES:
        return replace(few, stages=_MIN_STAGES)
    splits = max(1, few.splits // 2)
    if ARCHS[sm].has_clusters and few.cluster < _MAX_CLUSTER:
        row_warps = few.row_warps * few.splits // splits
        return replace(few, row_warps=row_warps, splits=splits, cluster=2 * few.cluster)
    return replace(few, splits=splits) if splits < few.splits else None


def more_tactics(sm: int, columns: int, x_dtype: str) -> tuple[More, ...]:
    """By ascending rows; the last one is for any number. Enough programs for a GPU come first."""
    if x_dtype == "f32":
        return (More(_ANY, 32, 32, 4, 2),)
    widest = columns // ARCHS[sm].multiprocessors
    block_n = 128 if widest >= 128 else 64 if widest >= 64 else 32
    stages = 4 if ARCHS[sm].has_large_shared else 2
    return (
        More(32, 32, min(block_n, 64), 4, stages),
        More(64, 64, block_n, 4, min(stages, 3)),
        More(_ANY, 128, max(block_n, 64), 8, min(stages, 3)),
    )


def widen_from(columns: int) -> int:
    """Rows from which dequantising the weight once is faster than in every tile of rows (H200).

    cuBLASLt cuts K when a product has few columns; multiply_mixed_input does not.
    """
    return 33 if columns <= 8192 else 128


_MEASURED: Mapping[tuple[int, bool], Mapping[tuple[int, int], Mapping[int, Few]]] = {
    (90, False): {
        (4096, 4096): {1: Few(1, 1, 2, 16, 2, digits=True, next_share=2)},
        (4096, 6144): {1: Few(1, 1, 3, 8, 3, digits=True, early=1)},
        (4096, 28672): {
            1: Few(1, 1, 7, 2, 6, digits=True),
            8: Few(8, 2, 7, 2, 3),
            16: Few(16, 2, 14, 1, 3, 2),
        },
        (14336, 4096): {1: Few(1, 1, 2, 16, 4, digits=True)},
    },
    (90, True): {(4096, 28672): {1: Few(1, 1, 14, 2, 5, digits=True, early=1)}},
}
"""(SM, whether gated) -> (K, N) -> rows -> the fastest of those tried on an H200, in whole steps;
sizes of an 8B model. Gated: gate and up, of which a block takes the same columns."""
