"""rope in one launch: a program takes a few heads of a row."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Extent, Launch, Site, Variant
from trtc.plugins.gpu.triton import launch_dependents, wait_for_inputs
from trtc.plugins.gpu.triton_launch import count_index, power_of_two, site_launch
from trtc.plugins.rotary.triton import rotate_heads

_TILE = 1024
"""Elements of a program."""
_NUM_WARPS = 2


@triton.jit
def rope(
    q,
    positions,
    cos,
    sin,
    q_norm,
    dims,
    out,
    COUNT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    SIN_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """HALF: of the rotated columns, which come first."""
    PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    launch_dependents(OVERLAPS)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    head = tl.program_id(0) % PARTS * HEADS + tl.arange(0, HEADS)
    is_real = row < tl.load(dims + COUNT)
    position = tl.load(positions + row, mask=is_real, other=0).to(tl.int64)
    angle = tl.arange(0, HALF_PAD)
    rotates = is_real & (angle < HALF)
    cosines = tl.load(cos + position * COS_STRIDE + angle, mask=rotates, other=0.0)
    sines = tl.load(sin + position * SIN_STRIDE + angle, mask=rotates, other=0.0)
    wait_for_inputs(OVERLAPS)
    if is_real:
        rotate_heads(
            q + row * Q_STRIDE,
            out + row * OUT_STRIDE,
            q_norm,
            None,
            None,
            None,
            cosines,
            sines,
            head,
            NUM_HEADS,
            HEAD_DIM,
            HALF,
            EPS,
            HALF_PAD,
            REST_PAD,
            NORM_AFTER,
        )


def lower(site: Site) -> tuple[Variant, ...]:
    return (Variant(work=(_launch(site),), max_rows=site.limits.max_num_tokens),)


def _launch(site: Site) -> Launch:
    num_heads = int(site.attributes["num_heads"])
    head_dim = int(site.attributes["head_dim"])
    rotary_dim = int(site.attributes["rotary_dim"])
    rest = head_dim - rotary_dim
    heads = min(max(1, _TILE // power_of_two(head_dim)), power_of_two(num_heads))
    return site_launch(
        site,
        rope,
        constants={
            "COUNT": count_index(site.rows),
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "HALF": rotary_dim // 2,
            "EPS": float(site.attributes["eps"]),
            "Q_STRIDE": site.strides["q"],
            "COS_STRIDE": site.strides["cos"],
            "SIN_STRIDE": site.strides["sin"],
            "OUT_STRIDE": site.strides["out"],
            "HEADS": heads,
            "HALF_PAD": power_of_two(rotary_dim // 2),
            "REST_PAD": power_of_two(rest) if rest else 0,
            "NORM_AFTER": int(site.attributes["norm_after"]),
        },
        programs=Extent(site.rows, times=-(-num_heads // heads)),
        num_warps=_NUM_WARPS,
    )
