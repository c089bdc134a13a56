"""latent_kv_write in one launch: a program is a few heads of a row of q, or the row's latent."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Extent, Site, Variant
from trtc.plugins.gpu.triton import divided, launch_dependents, quantized, wait_for_inputs
from trtc.plugins.gpu.triton_launch import count_index, power_of_two, site_launch

_TILE = 2048
"""Elements of q of a program."""
_NUM_WARPS = 4


@triton.jit
def latent_kv_write(
    q,
    kv,
    positions,
    slots,
    cos,
    sin,
    norm,
    q_scale,
    dims,
    q_out,
    pool_out,
    COUNT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    SIN_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    RANK_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`pool_out` is the pool's own memory. HALF: of the rotated columns, which come last."""
    PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS + 1
    launch_dependents(OVERLAPS)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    is_real = row < tl.load(dims + COUNT)
    position = tl.load(positions + row, mask=is_real, other=0).to(tl.int64)
    slot = tl.load(slots + row, mask=is_real, other=0).to(tl.int64)
    angle = tl.arange(0, HALF_PAD)
    rotates = is_real & (angle < HALF)
    cosines = tl.load(cos + position * COS_STRIDE + angle, mask=rotates, other=0.0)[None, :]
    sines = tl.load(sin + position * SIN_STRIDE + angle, mask=rotates, other=0.0)[None, :]
    wait_for_inputs(OVERLAPS)
    if is_real:
        if part < PARTS - 1:
            head = part * HEADS + tl.arange(0, HEADS)
            factor = None if q_scale is None else tl.load(q_scale + position)
            _queries(
                q + row * Q_STRIDE, q_out + row * OUT_STRIDE, factor, cosines, sines, head,
                NUM_HEADS, HEAD_DIM, HALF, HALF_PAD, NOPE_PAD,
            )  # fmt: skip
        else:
            target = pool_out + slot * (RANK + 2 * HALF)
            _latent(
                kv + row * KV_STRIDE, target, norm, cosines, sines,
                RANK, HALF, EPS, HALF_PAD, RANK_PAD,
            )  # fmt: skip


@triton.jit
def _queries(
    source,
    target,
    factor,
    cosines,
    sines,
    head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    NOPE_PAD: tl.constexpr,
):
    """Some heads of a row; `factor` multiplies what is rotated and may be None."""
    NOPE: tl.constexpr = HEAD_DIM - 2 * HALF
    THROUGH: tl.constexpr = source.dtype.element_ty
    angle = tl.arange(0, HALF_PAD)
    is_head = (head < NUM_HEADS)[:, None]
    at = head[:, None] * HEAD_DIM
    turning = at + NOPE + angle[None, :]
    inside = is_head & (angle < HALF)[None, :]
    first = tl.load(source + turning, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + turning + HALF, mask=inside, other=0.0).to(tl.float32)
    new_first = (first * cosines - second * sines).to(THROUGH)
    new_second = (second * cosines + first * sines).to(THROUGH)
    if factor is not None:
        new_first = (new_first.to(tl.float32) * factor).to(THROUGH)
        new_second = (new_second.to(tl.float32) * factor).to(THROUGH)
    tl.store(target + turning, new_first, mask=inside)
    tl.store(target + turning + HALF, new_second, mask=inside)
    if NOPE > 0:
        column = tl.arange(0, NOPE_PAD)
        still = at + column[None, :]
        inside_rest = is_head & (column < NOPE)[None, :]
        rest = tl.load(source + still, mask=inside_rest, other=0.0)
        if factor is not None:
            rest = (rest.to(tl.float32) * factor).to(THROUGH)
        tl.store(target + still, rest, mask=inside_rest)


@triton.jit
def _latent(
    source,
    target,
    norm,
    cosines,
    sines,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    RANK_PAD: tl.constexpr,
):
    """A row's latent, normalised, and the keys' rotated part behind it."""
    THROUGH: tl.constexpr = source.dtype.element_ty
    OUT: tl.constexpr = target.dtype.element_ty
    column = tl.arange(0, RANK_PAD)
    in_rank = column < RANK
    latent = tl.load(source + column, mask=in_rank, other=0.0).to(tl.float32)
    root = tl.sqrt_rn(tl.div_rn(tl.sum(latent * latent, 0), RANK * 1.0) + EPS)
    by = tl.load(norm + column, mask=in_rank, other=0.0)
    normed = quantized(divided(latent, root) * by, None, None, THROUGH, OUT)
    tl.store(target + column, normed, mask=in_rank)
    angle = tl.arange(0, HALF_PAD)
    turning = RANK + angle[None, :]
    inside = (angle < HALF)[None, :]
    first = tl.load(source + turning, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + turning + HALF, mask=inside, other=0.0).to(tl.float32)
    new_first = quantized(first * cosines - second * sines, None, None, THROUGH, OUT)
    new_second = quantized(second * cosines + first * sines, None, None, THROUGH, OUT)
    tl.store(target + turning, new_first, mask=inside)
    tl.store(target + turning + HALF, new_second, mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    num_heads, head_dim = int(site.attributes["num_heads"]), int(site.attributes["head_dim"])
    half, rank = site.axes["rotary_half"], site.axes["rank"]
    heads = min(max(1, _TILE // power_of_two(head_dim)), power_of_two(num_heads))
    launch = site_launch(
        site,
        latent_kv_write,
        constants={
            "COUNT": count_index(site.rows),
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "RANK": rank,
            "HALF": half,
            "EPS": float(site.attributes["eps"]),
            "Q_STRIDE": site.strides["q"],
            "KV_STRIDE": site.strides["kv"],
            "COS_STRIDE": site.strides["cos"],
            "SIN_STRIDE": site.strides["sin"],
            "OUT_STRIDE": site.strides["q_out"],
            "HEADS": heads,
            "HALF_PAD": power_of_two(half),
            "NOPE_PAD": power_of_two(max(1, head_dim - 2 * half)),
            "RANK_PAD": power_of_two(rank),
        },
        programs=Extent(site.rows, times=-(-num_heads // heads) + 1),
        num_warps=_NUM_WARPS,
    )
    return (Variant(work=(launch,), max_rows=site.limits.max_num_tokens),)
