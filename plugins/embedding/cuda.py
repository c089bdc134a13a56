"""embedding in one launch: each program takes some columns of a row."""

import triton
import triton.language as tl

from trtc.plugins.gemm.triton.weights import iq4_number, iq4_scale, six_bit_number
from trtc.plugins.gpu.lowering import Site, Variant
from trtc.plugins.gpu.triton import launch_dependents, row_and_columns, wait_for_inputs
from trtc.plugins.gpu.triton_launch import by_columns


@triton.jit
def embedding(
    token_ids,
    table,
    table_scale,
    scale_unit,
    dims,
    out,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_TOKEN_IDS: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    IQ4: tl.constexpr,
    SIX_BITS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """GROUP: columns that share one of table_scale. IQ4: the table has codes of plugins/iq4.py, two
    a byte, the first in the low half. SIX_BITS: it is in layout split of plugins/six_bits.py.
    TILES: it lies with its scales in the order of plugins/tiles.py, else row-major."""
    launch_dependents(OVERLAPS)
    row, column = row_and_columns(COLUMNS, BLOCK, VECTOR)
    inside = column < COLUMNS
    is_real = row < tl.load(dims + COUNT)
    wait_for_inputs(OVERLAPS)
    if is_real:
        # The sampler may have written the id a moment ago: clamp it to the table.
        token = tl.load(token_ids + row)
        token = tl.minimum(tl.maximum(token, 0), NUM_TOKEN_IDS - 1).to(tl.int64)
        if TILES:
            tile = token // 16 * (16 * COLUMNS) + column // 128 * (16 * 128)
            at = tile + token % 16 * 128 + column % 128
        else:
            at = token * TABLE_STRIDE + column
        if SIX_BITS:
            unit = table + token * (COLUMNS // 4 * 3) + column // 128 * 96 + column % 128 // 4
            low = tl.load(unit + column % 4 // 2 * 32, mask=inside, other=0).to(tl.int32)
            high = tl.load(unit + 64, mask=inside, other=0).to(tl.int32)
            values = six_bit_number(low >> column % 2 * 4, high >> column % 4 * 2)
        elif IQ4:
            codes = tl.load(table + at // 2, mask=inside, other=0).to(tl.int32)
            values = iq4_number((codes >> (at % 2 * 4).to(tl.int32)) & 15)
        else:
            values = tl.load(table + at, mask=inside, other=0.0)
        if table_scale is not None:
            GROUPS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
            if TILES:
                scale_at = token // 16 * (16 * GROUPS) + column // GROUP * 16 + token % 16
            else:
                scale_at = token * GROUPS + column // GROUP
            scales = tl.load(table_scale + scale_at, mask=inside, other=0.0)
            if scale_unit is not None:
                scales = iq4_scale(scales) * tl.load(scale_unit + token)
            values = values.to(tl.float32) * scales
        values = values.to(out.dtype.element_ty)
        if SCALE != 1.0:
            scale = tl.full([BLOCK], SCALE, tl.float32).to(out.dtype.element_ty).to(tl.float32)
            values = (values.to(tl.float32) * scale).to(out.dtype.element_ty)
        tl.store(out + row * OUT_STRIDE + column, values, mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    return by_columns(
        site,
        embedding,
        columns=site.axes["H"],
        vector_of="out" if site.attributes["weight_dtype"] in ("i6", "iq4") else "table",
        constants={
            "NUM_TOKEN_IDS": site.axes["V"],
            "TABLE_STRIDE": site.strides["table"],
            "SIX_BITS": site.attributes["layout"] == "split",
            "OUT_STRIDE": site.strides["out"],
            "SCALE": float(site.attributes["scale"]),
            "GROUP": int(site.attributes["group_size"]),
            "IQ4": site.attributes["weight_dtype"] == "iq4",
            "TILES": site.attributes["layout"] == "tiles",
        },
    )
