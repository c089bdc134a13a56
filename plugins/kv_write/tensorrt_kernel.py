"""kv_write in one launch: a program a row of the step, K then V, through 64-bit addresses."""

from collections.abc import Mapping

import triton
import triton.language as tl

from trtc.plugins.gpu.sources import KernelParameter, KernelSource

_MAX_BLOCK = 1024
"""Elements that a program moves at once; wider rows take several rounds."""


@triton.jit
def kv_write(
    k,
    v,
    pool,
    slots,
    k_scale,
    v_scale,
    pool_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    E4M3_POOL: tl.constexpr,
):
    """`pool` is not read: it and `pool_out` are the same memory."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    k_begin = (page * 2 * PAGE_SIZE + offset) * WIDTH
    v_begin = k_begin + PAGE_SIZE * WIDTH
    by_k = tl.load(k_scale)
    by_v = tl.load(v_scale)
    for begin in tl.static_range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < WIDTH
        keys = tl.load(k + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(v + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        # Rounded division, as the reference's: an approximate one can land on another E4M3.
        keys = tl.div_rn(keys, by_k)
        values = tl.div_rn(values, by_v)
        if E4M3_POOL:
            keys = tl.minimum(tl.maximum(keys, -448.0), 448.0)
            values = tl.minimum(tl.maximum(values, -448.0), 448.0)
        element = pool_out.dtype.element_ty
        tl.store(pool_out + k_begin + column, keys.to(element), mask=inside)
        tl.store(pool_out + v_begin + column, values.to(element), mask=inside)


def kernel(
    dtypes: Mapping[str, str], attributes: Mapping[str, int | float | str], page_size: int
) -> KernelSource:
    """The kernel of one node. Grid: (T, 1, 1).

    Args:
        dtypes: element types of `k` and `pool`.
        attributes: of the operator, complete.
    """
    width = int(attributes["num_kv_heads"]) * int(attributes["head_dim"])
    block = min(_MAX_BLOCK, triton.next_power_of_2(width))
    return KernelSource(
        function=kv_write,
        parameters=(
            KernelParameter("k", dtypes["k"]),
            KernelParameter("v", dtypes["k"]),
            KernelParameter("pool", dtypes["pool"]),
            KernelParameter("slots", "i32"),
            KernelParameter("k_scale", "f32"),
            KernelParameter("v_scale", "f32"),
            KernelParameter("pool_out", dtypes["pool"]),
        ),
        constants={
            "WIDTH": width,
            "BLOCK": block,
            "PAGE_SIZE": page_size,
            "E4M3_POOL": dtypes["pool"] == "f8e4m3",
        },
        num_warps=4 if block > 256 else 1,
    )
