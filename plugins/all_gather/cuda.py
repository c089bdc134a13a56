"""all_gather: NCCL puts the ranks' rows one after another, a kernel puts them side by side."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import DIMS, ONE, SCRATCH, Collective, Extent, Launch, Site, Variant
from trtc.plugins.gpu.sources import KernelParameter, KernelSource
from trtc.protos.dtypes import DTYPES

_BLOCK = 2048
_PARTS = "parts"


@triton.jit
def join_columns(
    parts,
    dims,
    out,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`parts` is [ranks, rows of the bucket, COLUMNS]; the bucket is the grid's x."""
    row = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    rank = tl.program_id(1) // BLOCKS
    column = tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    if row < tl.load(dims + COUNT):
        begin = (rank * tl.num_programs(0) + row) * COLUMNS
        values = tl.load(parts + begin + column, mask=inside)
        tl.store(out + row * OUT_STRIDE + rank * COLUMNS + column, values, mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    ranks, columns = int(site.attributes["ranks"]), site.axes["K"]
    dtype = site.dtypes["x"]
    is_rows = site.rows == "rows"
    max_rows = site.limits.max_batch_size if is_rows else site.limits.max_num_tokens
    block = min(_BLOCK, triton.next_power_of_2(columns))
    join = Launch(
        kernel=KernelSource(
            function=join_columns,
            parameters=(
                KernelParameter("parts", dtype),
                KernelParameter("dims", "i32"),
                KernelParameter("out", dtype),
            ),
            constants={
                "COUNT": 2 if is_rows else 0,
                "COLUMNS": columns,
                "OUT_STRIDE": site.strides["out"],
                "BLOCK": block,
            },
        ),
        arguments=(SCRATCH + _PARTS, DIMS, "out"),
        grid=(Extent(site.rows), Extent(times=ranks * triton.cdiv(columns, block)), ONE),
    )
    return (
        Variant(
            work=(Collective("all_gather", "x", SCRATCH + _PARTS), join),
            max_rows=max_rows,
            scratch={_PARTS: ranks * DTYPES[dtype].num_bytes(max_rows * columns)},
        ),
    )
