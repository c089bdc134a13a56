"""embedding in one launch: each program takes some columns of a row."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Site, Variant
from trtc.plugins.gpu.triton import launch_dependents, row_and_columns, wait_for_inputs
from trtc.plugins.gpu.triton_launch import by_columns


@triton.jit
def embedding(
    token_ids,
    table,
    table_scale,
    dims,
    out,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_TOKEN_IDS: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """GROUP: columns that share one of table_scale."""
    launch_dependents(OVERLAPS)
    row, column = row_and_columns(COLUMNS, BLOCK, VECTOR)
    inside = column < COLUMNS
    is_real = row < tl.load(dims + COUNT)
    wait_for_inputs(OVERLAPS)
    if is_real:
        # The sampler may have written the id a moment ago: clamp it to the table.
        token = tl.load(token_ids + row)
        token = tl.minimum(tl.maximum(token, 0), NUM_TOKEN_IDS - 1).to(tl.int64)
        values = tl.load(table + token * TABLE_STRIDE + column, mask=inside, other=0.0)
        if table_scale is not None:
            GROUPS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
            scales = table_scale + token * GROUPS + column // GROUP
            values = values.to(tl.float32) * tl.load(scales, mask=inside, other=0.0)
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
        vector_of="table",
        constants={
            "NUM_TOKEN_IDS": site.axes["V"],
            "TABLE_STRIDE": site.strides["table"],
            "OUT_STRIDE": site.strides["out"],
            "SCALE": float(site.attributes["scale"]),
            "GROUP": int(site.attributes["group_size"]),
        },
    )
