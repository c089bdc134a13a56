"""head_linear in one launch: a program takes some rows of x and some columns of a head's result.

Programs that share a head's columns come one after another, so that its matrix is read once.
"""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import ONE, Extent, Launch, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs
from trtc.plugins.gpu.triton_launch import count_index, power_of_two

_FEW_ROWS = 64
_BLOCK_K = 64


@triton.jit
def head_linear(
    x,
    weight,
    dims,
    out,
    COUNT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """REST: columns of a head behind K, which pass unchanged."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    launch_dependents(OVERLAPS)
    num_rows = tl.load(dims + COUNT)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1) // BLOCKS
    block = tl.program_id(1) % BLOCKS
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    wait_for_inputs(OVERLAPS)
    if tl.program_id(0) * BLOCK_M < num_rows:
        source = x + row.to(tl.int64) * X_STRIDE + head * (K + REST)
        target = out + row.to(tl.int64) * OUT_STRIDE + head * (N + REST)
        matrix = weight + tl.cast(head, tl.int64) * (N * K)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in range(0, K, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            a = tl.load(
                source[:, None] + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0
            )
            b = tl.load(
                matrix + n[None, :] * K + k[:, None],
                mask=(n < N)[None, :] & (k < K)[:, None],
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision="ieee")
        inside = is_row[:, None] & (n < N)[None, :]
        tl.store(target[:, None] + n[None, :], total.to(out.dtype.element_ty), mask=inside)
        if (block == 0) & (REST > 0):
            column = tl.arange(0, REST_PAD)
            passes = is_row[:, None] & (column < REST)[None, :]
            values = tl.load(source[:, None] + K + column[None, :], mask=passes, other=0.0)
            tl.store(target[:, None] + N + column[None, :], values, mask=passes)


def lower(site: Site) -> tuple[Variant, ...]:
    most = site.limits.max_num_tokens
    is_f32 = site.dtypes["x"] == "f32"
    few = _launch(site, 16, 32 if is_f32 else 64, num_warps=4)
    if most <= _FEW_ROWS:
        return (Variant(work=(few,), max_rows=most),)
    many = _launch(site, 32 if is_f32 else 64, 32 if is_f32 else 128, num_warps=4)
    return (Variant(work=(few,), max_rows=_FEW_ROWS), Variant(work=(many,), max_rows=most))


def _launch(site: Site, block_m: int, block_n: int, num_warps: int) -> Launch:
    heads, n, k = (site.axes[name] for name in ("num_heads", "N", "K"))
    rest = int(site.attributes["in_dim"]) - k
    block_n = min(block_n, max(16, power_of_two(n)))
    return scratch_launch(
        site,
        head_linear,
        {
            "COUNT": count_index(site.rows),
            "N": n,
            "K": k,
            "REST": rest,
            "REST_PAD": power_of_two(max(1, rest)),
            "X_STRIDE": site.strides["x"],
            "OUT_STRIDE": site.strides["out"],
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": min(_BLOCK_K, max(16, power_of_two(k))),
        },
        (Extent(site.rows, block=block_m), Extent(times=heads * -(-n // block_n)), ONE),
        num_warps=num_warps,
        scratch={},
    )
