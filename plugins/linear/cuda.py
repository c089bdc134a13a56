"""linear on a GPU: cuBLASLt where it takes the site, a tile kernel that takes every site else."""

import triton
import triton.language as tl

from trtc.plugins.cuda.device import launch_dependents, wait_for_inputs
from trtc.plugins.cuda.launch import Extent, Launch, MatrixProduct, Site, Variant
from trtc.plugins.cuda.specialise import count_index, site_launch
from trtc.protos.errors import UnsupportedError

_FP8_MULTIPLE = 16
"""Rows and columns that cuBLASLt's E4M3 products are made of."""
_BLOCK_M, _BLOCK_N, _BLOCK_K = 64, 64, 64


@triton.jit
def tile_product(
    x,
    weight,
    weight_scale,
    input_scale,
    bias,
    residual,
    dims,
    out,
    COUNT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program a tile of BLOCK_M rows and BLOCK_N columns."""
    launch_dependents(OVERLAPS)
    first = tl.program_id(0) // COLUMN_TILES * BLOCK_M
    num_rows = tl.load(dims + COUNT)
    wait_for_inputs(OVERLAPS)
    if first < num_rows:
        row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        column = tl.program_id(0) % COLUMN_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        in_rows, in_columns = row < num_rows, column < N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in range(0, K, BLOCK_K):
            in_depth = begin + depth < K
            values = tl.load(
                x + row[:, None] * X_STRIDE + (begin + depth)[None, :],
                mask=in_rows[:, None] & in_depth[None, :],
                other=0.0,
            )
            weights = tl.load(
                weight + column[None, :].to(tl.int64) * K + (begin + depth)[:, None],
                mask=in_columns[None, :] & in_depth[:, None],
                other=0.0,
            )
            total = tl.dot(values, weights, total, input_precision="ieee")
        if weight_scale is not None:
            total *= tl.load(weight_scale + column, mask=in_columns, other=0.0)[None, :]
        if input_scale is not None:
            total *= tl.load(input_scale)
        if bias is not None:
            total += tl.load(bias + column, mask=in_columns, other=0.0)[None, :]
        if SOFTCAP > 0:
            # tanh(x) = 2 sigmoid(2 x) - 1
            total = SOFTCAP * (2.0 * tl.sigmoid(2.0 * total / SOFTCAP) - 1.0)
        inside = in_rows[:, None] & in_columns[None, :]
        if residual is not None:
            at = row[:, None] * RESIDUAL_STRIDE + column[None, :]
            total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        at = row[:, None] * OUT_STRIDE + column[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    """See plugins/cuda/launch.py.

    Raises:
        UnsupportedError: weights that no kernel here multiplies.
    """
    if site.dtypes["weight"] not in ("f32", "bf16", "f8e4m3"):
        raise UnsupportedError(
            f"no CUDA kernel multiplies {site.dtypes['weight']} weights",
            field="--dtype",
            remedy="Use --target cpu for this scheme",
        )
    most = site.limits.max_num_tokens
    if _is_plain(site):
        return (Variant(work=(_product(site),), max_rows=most),)
    return (Variant(work=(_tiles(site),), max_rows=most),)


def _is_plain(site: Site) -> bool:
    """Whether cuBLASLt computes all of it, as torch calls it."""
    if site.has("residual") or site.attributes["softcap"]:
        return False
    if site.dtypes["x"] != "f8e4m3":
        return not site.has("weight_scale") and site.dtypes["x"] == site.dtypes["weight"]
    is_scaled = site.has("weight_scale") and site.has("input_scale")
    return is_scaled and all(site.axes[axis] % _FP8_MULTIPLE == 0 for axis in ("N", "K"))


def _product(site: Site) -> MatrixProduct:
    def given(parameter: str) -> str:
        return parameter if site.has(parameter) else ""

    return MatrixProduct(
        input_scale=given("input_scale"),
        weight_scale=given("weight_scale"),
        bias=given("bias"),
    )


def _tiles(site: Site) -> Launch:
    column_tiles = triton.cdiv(site.axes["N"], _BLOCK_N)
    return site_launch(
        site,
        tile_product,
        constants={
            "COUNT": count_index(site.rows),
            "N": site.axes["N"],
            "K": site.axes["K"],
            "X_STRIDE": site.strides["x"],
            "RESIDUAL_STRIDE": site.strides.get("residual", 0),
            "OUT_STRIDE": site.strides["out"],
            "SOFTCAP": float(site.attributes["softcap"]),
            "COLUMN_TILES": column_tiles,
            "BLOCK_M": _BLOCK_M,
            "BLOCK_N": _BLOCK_N,
            "BLOCK_K": _BLOCK_K,
        },
        programs=Extent(site.rows, block=_BLOCK_M, times=column_tiles),
        num_warps=4,
    )
