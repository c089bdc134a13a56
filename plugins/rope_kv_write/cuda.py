"""rope_kv_write in one launch: a program takes a few heads of a row, of q, of k or of v."""

import triton
import triton.language as tl

from trtc.plugins.gpu.lowering import Extent, Launch, Site, Variant
from trtc.plugins.gpu.triton import (
    divided,
    hadamard,
    is_finite,
    largest_of,
    launch_dependents,
    quantized,
    scale_of_head,
    wait_for_inputs,
)
from trtc.plugins.gpu.triton_launch import count_index, power_of_two, site_launch
from trtc.plugins.packed_heads.triton import store_packed
from trtc.plugins.rotary.triton import rotate_heads, rotated_heads

_FEW_ROWS = 256
_SMALL_TILE, _LARGE_TILE = 1024, 2048
"""Elements of a program: up to _FEW_ROWS rows the small tile spreads over more of the GPU. Threads
lie alike on a head in both, so its norm is summed in one order."""
_NUM_WARPS = 2


@triton.jit
def rope_kv_write(
    q,
    k,
    v,
    positions,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    v_norm,
    q_scale,
    k_scale,
    v_scale,
    dims,
    q_out,
    pool_out,
    COUNT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STORED: tl.constexpr,
    HALF: tl.constexpr,
    EPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    COS_STRIDE: tl.constexpr,
    SIN_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`pool_out` is the pool's own memory. HALF: of the rotated columns, which come first.
    STORED: elements of the pool that a head takes, its scale included; see plugins/kv_pool.py."""
    PLANE: tl.constexpr = PAGE_SIZE * NUM_KV_HEADS * STORED
    PACKED: tl.constexpr = pool_out.dtype.element_ty == tl.uint8
    CODES: tl.constexpr = HEAD_DIM // 2 if PACKED else HEAD_DIM
    Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    PARTS: tl.constexpr = Q_PARTS + 2 * KV_PARTS
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
    plane_of_k = pool_out + slot // PAGE_SIZE * (2 * PLANE)
    row_of_k = plane_of_k + slot % PAGE_SIZE * (NUM_KV_HEADS * CODES)
    row_of_v = row_of_k + PLANE
    scales_of_k = None
    scales_of_v = None
    if STORED > CODES:
        behind = plane_of_k + PAGE_SIZE * NUM_KV_HEADS * CODES
        at_scale = slot % PAGE_SIZE * NUM_KV_HEADS
        scales_of_k = behind.to(tl.pointer_type(tl.float32)) + at_scale
        scales_of_v = (behind + PLANE).to(tl.pointer_type(tl.float32)) + at_scale
    factor = None if q_scale is None else tl.load(q_scale + position)
    wait_for_inputs(OVERLAPS)
    if is_real:
        if part < Q_PARTS:
            head = part * HEADS + tl.arange(0, HEADS)
            rotate_heads(
                q + row * Q_STRIDE,
                q_out + row * OUT_STRIDE,
                q_norm,
                factor,
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
        elif part < Q_PARTS + KV_PARTS:
            head = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)
            if PACKED:
                keys = rotated_heads(
                    k + row * K_STRIDE,
                    k_norm,
                    cos + position * COS_STRIDE,
                    sin + position * SIN_STRIDE,
                    head,
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    HALF,
                    EPS,
                    HEAD_PAD,
                    NORM_AFTER,
                )
                turned = hadamard(keys, HEAD_DIM & -HEAD_DIM)
                store_packed(
                    turned, is_finite(keys), row_of_k, scales_of_k, head, NUM_KV_HEADS, HEAD_DIM
                )
            else:
                rotate_heads(
                    k + row * K_STRIDE,
                    row_of_k,
                    k_norm,
                    None,
                    k_scale,
                    scales_of_k,
                    cosines,
                    sines,
                    head,
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    HALF,
                    EPS,
                    HALF_PAD,
                    REST_PAD,
                    NORM_AFTER,
                )
        else:
            head = (part - Q_PARTS - KV_PARTS) * HEADS + tl.arange(0, HEADS)
            column = tl.arange(0, HEAD_PAD)
            at = head[:, None] * HEAD_DIM + column[None, :]
            inside = (head < NUM_KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
            by = None if v_scale is None else tl.load(v_scale)
            values = tl.load(v + row * V_STRIDE + at, mask=inside, other=0.0).to(tl.float32)
            if v_norm is not None:
                squares = tl.sum(values * values, 1)
                root = tl.sqrt_rn(tl.div_rn(squares, HEAD_DIM * 1.0) + EPS)[:, None]
                weight = tl.load(v_norm + column, mask=column < HEAD_DIM, other=0.0)[None, :]
                values = (divided(values, root) * weight).to(v.dtype.element_ty).to(tl.float32)
            if PACKED:
                store_packed(
                    values, is_finite(values), row_of_v, scales_of_v, head, NUM_KV_HEADS, HEAD_DIM
                )
            else:
                if STORED > CODES:
                    own = scale_of_head(
                        largest_of(values), is_finite(values), pool_out.dtype.element_ty
                    )
                    tl.store(scales_of_v + head, own, mask=head < NUM_KV_HEADS)
                    by = own[:, None]
                written = quantized(values, None, by, v.dtype.element_ty, pool_out.dtype.element_ty)
                tl.store(row_of_v + at, written, mask=inside)


def lower(site: Site) -> tuple[Variant, ...]:
    most = site.limits.max_num_tokens
    small = Variant(work=(_launch(site, _SMALL_TILE),), max_rows=min(_FEW_ROWS, most))
    if most <= _FEW_ROWS:
        return (small,)
    return (small, Variant(work=(_launch(site, _LARGE_TILE),), max_rows=most))


def _launch(site: Site, tile: int) -> Launch:
    num_heads = int(site.attributes["num_heads"])
    num_kv_heads = int(site.attributes["num_kv_heads"])
    head_dim = int(site.attributes["head_dim"])
    rotary_dim = int(site.attributes["rotary_dim"])
    head_pad, rest = power_of_two(head_dim), head_dim - rotary_dim
    heads = min(max(1, tile // head_pad), power_of_two(num_heads))
    parts = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
    return site_launch(
        site,
        rope_kv_write,
        constants={
            "COUNT": count_index(site.rows),
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "STORED": site.axes["stored_width"],
            "HALF": rotary_dim // 2,
            "EPS": float(site.attributes["eps"]),
            "PAGE_SIZE": site.page_size,
            "Q_STRIDE": site.strides["q"],
            "K_STRIDE": site.strides["k"],
            "V_STRIDE": site.strides["v"],
            "COS_STRIDE": site.strides["cos"],
            "SIN_STRIDE": site.strides["sin"],
            "OUT_STRIDE": site.strides["q_out"],
            "HEADS": heads,
            "HALF_PAD": power_of_two(rotary_dim // 2),
            "REST_PAD": power_of_two(rest) if rest else 0,
            "NORM_AFTER": int(site.attributes["norm_after"]),
            "HEAD_PAD": head_pad,
        },
        programs=Extent(site.rows, times=parts),
        num_warps=_NUM_WARPS,
    )
