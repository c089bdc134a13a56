"""linear on a GPU.

integers    mixed_input.py, whatever the rows; E4M3 in groups too
few rows    skinny.cu, cut by the tables of skinny.py
more        streamed.cu, cut by those of streamed.py, where there is one for the SM and the sizes
many        cuBLASLt where it takes the site, the softcap of its logits applied after it;
            a tile kernel that takes every site else
"""

import triton
import triton.language as tl

from trtc.plugins.gemm.mixed_input import lower_mixed_input
from trtc.plugins.gemm.skinny import skinny_launches
from trtc.plugins.gemm.streamed import streamed_launches
from trtc.plugins.gpu.lowering import Extent, Gemm, Launch, Site, Variant
from trtc.plugins.gpu.triton import launch_dependents, row_and_columns, softcapped, wait_for_inputs
from trtc.plugins.gpu.triton_launch import count_index, site_launch, vector

_BLOCK = 1024
"""Elements of a row that a program of `cap` takes."""
_INTEGERS = ("i8", "i6", "i4", "u4", "iq4", "f4e2m1")
_FP8_MULTIPLE = 16
"""What N and K must be a multiple of for cuBLASLt's E4M3 products."""


@triton.jit
def tile_product(
    x,
    weight,
    weight_scale,
    input_scale,
    bias,
    residual,
    row_scale,
    dims,
    out,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program a tile of the result; tiles of the same columns follow each other.

    WIDEN: x and the weight are multiplied as bf16, which has all of their numbers.
    """
    launch_dependents(OVERLAPS)
    N_TILES: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    OPERAND: tl.constexpr = tl.bfloat16 if WIDEN else x.dtype.element_ty
    num_tiles = tl.num_programs(0) // N_TILES
    row = (tl.program_id(0) % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(0) // num_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    num_rows = tl.load(dims + COUNT)
    wait_for_inputs(OVERLAPS)
    if tl.program_id(0) % num_tiles * BLOCK_M < num_rows:
        is_row = row < num_rows
        is_column = column < COLUMNS
        inside = is_row[:, None] & is_column[None, :]
        x_rows = x + row[:, None] * X_STRIDE
        weight_rows = weight + tl.minimum(column, COLUMNS - 1).to(tl.int64)[None, :] * DEPTH
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
            k = begin + tl.arange(0, BLOCK_K)
            x_tile = tl.load(
                x_rows + k[None, :], mask=is_row[:, None] & (k < DEPTH)[None, :], other=0.0
            )
            tile = tl.load(weight_rows + k[:, None], mask=(k < DEPTH)[:, None], other=0.0)
            sums = tl.dot(x_tile.to(OPERAND), tile.to(OPERAND), sums, input_precision="ieee")
        if weight_scale is not None:
            scale = tl.load(weight_scale + column, mask=is_column, other=0.0)
            sums = sums * scale[None, :]
        if input_scale is not None:
            sums = sums * tl.load(input_scale)
        if row_scale is not None:
            scales = row_scale + row * SCALE_STRIDE
            sums = sums * tl.load(scales, mask=is_row, other=0.0)[:, None]
        if bias is not None:
            sums = sums + tl.load(bias + column, mask=is_column, other=0.0)[None, :]
        if SOFTCAP > 0:
            sums = softcapped(sums, SOFTCAP)
        if residual is not None:
            at = residual + row[:, None] * RESIDUAL_STRIDE + column[None, :]
            sums = sums + tl.load(at, mask=inside, other=0.0).to(tl.float32)
        to = out + row[:, None] * OUT_STRIDE + column[None, :]
        tl.store(to, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def cap(
    dims,
    out,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The softcap of f32 logits, in place."""
    launch_dependents(OVERLAPS)
    row, column = row_and_columns(COLUMNS, BLOCK, VECTOR)
    inside = column < COLUMNS
    num_rows = tl.load(dims + COUNT)
    wait_for_inputs(OVERLAPS)
    if row < num_rows:
        at = out + row * OUT_STRIDE + column
        tl.store(at, softcapped(tl.load(at, mask=inside, other=0.0), SOFTCAP), mask=inside)


def lower_gemm(site: Site) -> tuple[Variant, ...]:
    """Variants of a linear whose weight is row-major, 4-bit in tiles, or 6-bit and split.

    Raises:
        UnsupportedError: weights in groups that are too small for the tensor cores.
    """
    if site.attributes["weight_dtype"] in _INTEGERS or site.attributes["group_size"]:
        return lower_mixed_input(site)
    many = Variant(work=_many_rows(site), max_rows=site.limits.max_num_tokens)
    return (*_few_rows(site), many)


def _few_rows(site: Site) -> tuple[Variant, ...]:
    """By ascending rows, up to the site's limit. streamed.py's tables have only what was faster
    there than in skinny.cu."""
    most = site.limits.max_num_tokens
    launches = sorted((skinny_launches(site) | streamed_launches(site)).items())
    enough = next((at for at, (rows, _) in enumerate(launches, 1) if rows >= most), len(launches))
    return tuple(
        Variant(work=(launch,), max_rows=min(rows, most)) for rows, launch in launches[:enough]
    )


def _many_rows(site: Site) -> tuple[Launch | Gemm, ...]:
    capped = float(site.attributes["softcap"]) > 0
    if not _has_library_product(site) or (capped and site.dtypes["out"] != "f32"):
        return (tiles_launch(site),)
    optional = ("input_scale", "weight_scale", "bias", "residual", "row_scale")
    names = {name: name for name in optional if site.has(name)}
    gemm = Gemm(**names)
    return (gemm, _cap_launch(site)) if capped else (gemm,)


def _has_library_product(site: Site) -> bool:
    """Whether cuBLASLt computes all of the site but its softcap."""
    x, weight, out = (site.dtypes[name] for name in ("x", "weight", "out"))
    softcap = float(site.attributes["softcap"])
    if x != weight or (site.has("residual") and (site.dtypes["residual"] != out or softcap > 0)):
        return False
    if weight == "f8e4m3":
        whole = site.axes["N"] % _FP8_MULTIPLE == 0 and site.axes["K"] % _FP8_MULTIPLE == 0
        # cuBLASLt takes scales of rows on sm_90 (CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F).
        has_scale = site.has("input_scale") or (site.has("row_scale") and site.arch.has_wgmma)
        return whole and out == "bf16" and has_scale and site.has("weight_scale")
    return (
        weight in ("f32", "bf16") and not site.has("input_scale") and not site.has("weight_scale")
    )


def tiles_launch(site: Site) -> Launch:
    """The kernel that is right for every shape and type."""
    wide = site.dtypes["x"] == "f32"
    block_m, block_n, block_k = (32, 32, 32) if wide else (32, 64, 64)
    columns = site.axes["N"]
    return site_launch(
        site,
        tile_product,
        constants={
            "COUNT": count_index(site.rows),
            "COLUMNS": columns,
            "DEPTH": site.axes["K"],
            "X_STRIDE": site.strides["x"],
            "SCALE_STRIDE": site.strides.get("row_scale", 0),
            "RESIDUAL_STRIDE": site.strides.get("residual", 0),
            "OUT_STRIDE": site.strides["out"],
            "SOFTCAP": float(site.attributes["softcap"]),
            "WIDEN": not wide,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "STAGES": 2,
        },
        programs=Extent(site.rows, block=block_m, times=triton.cdiv(columns, block_n)),
        num_warps=4,
    )


def _cap_launch(site: Site) -> Launch:
    columns = site.axes["N"]
    return site_launch(
        site,
        cap,
        constants={
            "COUNT": count_index(site.rows),
            "COLUMNS": columns,
            "OUT_STRIDE": site.strides["out"],
            "SOFTCAP": float(site.attributes["softcap"]),
            "BLOCK": _BLOCK,
            "VECTOR": vector("f32"),
        },
        programs=Extent(site.rows, times=triton.cdiv(columns, _BLOCK)),
        num_warps=4,
    )
