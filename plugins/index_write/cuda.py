"""index_write in one launch: a program is a few heads of a row of q, or the row's key."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Extent, Site, Variant
from trtc.plugins.gpu.triton import divided, launch_dependents, quantized, wait_for_inputs
from trtc.plugins.gpu.triton_launch import count_index, power_of_two, site_launch
from trtc.plugins.rotary.triton import rotate_heads, turned

_TILE = 2048
"""Elements of q of a program."""
_NUM_WARPS = 4


@triton.jit
def index_write(
    q,
    k,
    positions,
    slots,
    cos,
    sin,
    norm,
    bias,
    dims,
    q_out,
    pool_out,
    COUNT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    SIN_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`pool_out` is the pool's own memory. HALF: of the rotated columns, which come first."""
    PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS + 1
    launch_dependents(OVERLAPS)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    is_real = row < tl.load(dims + COUNT)
    position = tl.load(positions + row, mask=is_real, other=0).to(tl.int64)
    slot = tl.load(slots + row, mask=is_real, other=0).to(tl.int64)
    angle = tl.arange(0, HALF_PAD)
    rotates = is_real & (angle < HALF)
    cosines = tl.load(cos + position * COS_STRIDE + angle, mask=rotates, other=0.0)
    sines = tl.load(sin + position * SIN_STRIDE + angle, mask=rotates, other=0.0)
    wait_for_inputs(OVERLAPS)
    if is_real:
        if part < PARTS - 1:
            head = part * HEADS + tl.arange(0, HEADS)
            rotate_heads(
                q + row * Q_STRIDE, q_out + row * OUT_STRIDE, None, None, None, None, cosines,
                sines, head, NUM_HEADS, WIDTH, HALF, EPS, HALF_PAD, REST_PAD, NORM_AFTER=False,
            )  # fmt: skip
        else:
            _key(
                k + row * K_STRIDE, pool_out + slot * WIDTH, norm, bias, cosines, sines,
                WIDTH, HALF, EPS, HALF_PAD, REST_PAD,
            )  # fmt: skip


@triton.jit
def _key(
    source,
    target,
    norm,
    bias,
    cosines,
    sines,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
):
    """A row's key, normalised and rotated."""
    THROUGH: tl.constexpr = source.dtype.element_ty
    OUT: tl.constexpr = target.dtype.element_ty
    first_at = tl.arange(0, HALF_PAD)
    in_half = first_at < HALF
    second_at = HALF + first_at
    rest_at = 2 * HALF + tl.arange(0, REST_PAD)
    in_rest = rest_at < WIDTH
    first = tl.load(source + first_at, mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(source + second_at, mask=in_half, other=0.0).to(tl.float32)
    rest = tl.load(source + rest_at, mask=in_rest, other=0.0).to(tl.float32)
    total = tl.sum(first, 0) + tl.sum(second, 0) + tl.sum(rest, 0)
    mean = tl.div_rn(total, WIDTH * 1.0)
    first = tl.where(in_half, first - mean, 0.0)
    second = tl.where(in_half, second - mean, 0.0)
    rest = tl.where(in_rest, rest - mean, 0.0)
    squares = tl.sum(first * first, 0) + tl.sum(second * second, 0) + tl.sum(rest * rest, 0)
    root = tl.sqrt_rn(tl.div_rn(squares, WIDTH * 1.0) + EPS)
    first = _scaled(first, root, norm, bias, first_at, in_half, THROUGH)
    second = _scaled(second, root, norm, bias, second_at, in_half, THROUGH)
    rest = _scaled(rest, root, norm, bias, rest_at, in_rest, THROUGH)
    new_first, new_second = turned(first[None, :], second[None, :], cosines, sines)
    new_first = quantized(new_first, None, None, THROUGH, OUT)
    new_second = quantized(new_second, None, None, THROUGH, OUT)
    tl.store(target + first_at[None, :], new_first, mask=in_half[None, :])
    tl.store(target + second_at[None, :], new_second, mask=in_half[None, :])
    tl.store(target + rest_at, quantized(rest, None, None, THROUGH, OUT), mask=in_rest)


@triton.jit
def _scaled(values, root, norm, bias, column, inside, THROUGH: tl.constexpr):
    by = tl.load(norm + column, mask=inside, other=0.0)
    plus = tl.load(bias + column, mask=inside, other=0.0)
    return (divided(values, root) * by + plus).to(THROUGH).to(tl.float32)


def lower(site: Site) -> tuple[Variant, ...]:
    num_heads, width = int(site.attributes["num_heads"]), site.axes["width"]
    half = site.axes["rotary_half"]
    rest = width - 2 * half
    heads = min(max(1, _TILE // power_of_two(width)), power_of_two(num_heads))
    launch = site_launch(
        site,
        index_write,
        constants={
            "COUNT": count_index(site.rows),
            "NUM_HEADS": num_heads,
            "WIDTH": width,
            "HALF": half,
            "EPS": float(site.attributes["eps"]),
            "Q_STRIDE": site.strides["q"],
            "K_STRIDE": site.strides["k"],
            "COS_STRIDE": site.strides["cos"],
            "SIN_STRIDE": site.strides["sin"],
            "OUT_STRIDE": site.strides["q_out"],
            "HEADS": heads,
            "HALF_PAD": power_of_two(half),
            "REST_PAD": power_of_two(max(1, rest)),
        },
        programs=Extent(site.rows, times=-(-num_heads // heads) + 1),
        num_warps=_NUM_WARPS,
    )
    return (Variant(work=(launch,), max_rows=site.limits.max_num_tokens),)
