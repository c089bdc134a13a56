"""layer_inputs in one launch: a program takes the columns of some layers in a row."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Extent, Site, Variant
from trtc.plugins.gpu.triton import divided, launch_dependents, wait_for_inputs
from trtc.plugins.gpu.triton_launch import count_index, power_of_two, site_launch

_TILE = 1024
"""Elements of a program."""


@triton.jit
def layer_inputs(
    projected,
    token_ids,
    table,
    norm,
    dims,
    out,
    COUNT: tl.constexpr,
    LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_TOKEN_IDS: tl.constexpr,
    EPS: tl.constexpr,
    TABLE_SCALE: tl.constexpr,
    SCALE: tl.constexpr,
    IN_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    PART: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """PART: layers of a program."""
    THROUGH: tl.constexpr = out.dtype.element_ty
    PARTS: tl.constexpr = (LAYERS + PART - 1) // PART
    launch_dependents(OVERLAPS)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    layer = tl.program_id(0) % PARTS * PART + tl.arange(0, PART)
    column = tl.arange(0, WIDTH_PAD)
    at = layer[:, None] * WIDTH + column[None, :]
    inside = (layer < LAYERS)[:, None] & (column < WIDTH)[None, :]
    is_real = row < tl.load(dims + COUNT)
    weight = tl.load(norm + column, mask=column < WIDTH, other=0.0)[None, :]
    wait_for_inputs(OVERLAPS)
    if is_real:
        # The sampler may have written the id a moment ago: clamp it to the table.
        token = tl.load(token_ids + row)
        token = tl.minimum(tl.maximum(token, 0), NUM_TOKEN_IDS - 1).to(tl.int64)
        entry = tl.load(table + token * TABLE_STRIDE + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(projected + row * IN_STRIDE + at, mask=inside, other=0.0).to(tl.float32)
        root = tl.sqrt_rn(tl.div_rn(tl.sum(value * value, 1), WIDTH * 1.0) + EPS)[:, None]
        normed = (divided(value, root) * weight).to(THROUGH).to(tl.float32)
        total = normed + (entry * TABLE_SCALE).to(THROUGH).to(tl.float32)
        total = total.to(THROUGH).to(tl.float32) * SCALE
        tl.store(out + row * OUT_STRIDE + at, total.to(THROUGH), mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    width = int(site.attributes["width"])
    layers, width_pad = site.axes["K"] // width, power_of_two(width)
    part = min(max(1, _TILE // width_pad), power_of_two(layers))
    launch = site_launch(
        site,
        layer_inputs,
        constants={
            "COUNT": count_index(site.rows),
            "LAYERS": layers,
            "WIDTH": width,
            "NUM_TOKEN_IDS": site.axes["V"],
            "EPS": float(site.attributes["eps"]),
            "TABLE_SCALE": float(site.attributes["table_scale"]),
            "SCALE": float(site.attributes["scale"]),
            "IN_STRIDE": site.strides["projected"],
            "TABLE_STRIDE": site.strides["table"],
            "OUT_STRIDE": site.strides["out"],
            "PART": part,
            "WIDTH_PAD": width_pad,
        },
        programs=Extent(site.rows, times=-(-layers // part)),
        num_warps=4,
    )
    return (Variant(work=(launch,), max_rows=site.limits.max_num_tokens),)
