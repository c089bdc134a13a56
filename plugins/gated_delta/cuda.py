"""gated_delta for GPUs: the recurrence, then the gated norm over whole heads."""

from trtc.plugins.gated_delta.triton import delta_chunks, delta_rows, gated_norm
from trtc.plugins.gpu.lowering import ONE, Extent, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.protos.dtypes import DTYPES

_BLOCK = 32
"""Columns of a head's state in a program: 16 KB of registers, of a key of 128."""
_WARPS = 4
_NORM_BLOCK, _NORM_WARPS = 1024, 4
"""Values of a program of the norm."""
_CHUNK = 16
"""Rows: the inverse of a matrix of so many is four products, and accurate in f32."""
_PRECISION = {"f32": ("ieee", "ieee"), "bf16": ("tf32", "tf32x3")}
"""Of products with the state, and of those that are inverted, by the type of activations."""


def lower(site: Site) -> tuple[Variant, ...]:
    heads, width = site.axes["value_heads"], site.axes["value_dim"]
    norm_heads = min(max(1, _NORM_BLOCK // power_of_two(width)), power_of_two(heads))
    found = {"found": "f32"}
    block = min(_BLOCK, max(_CHUNK, power_of_two(width)))
    by_sequence = (Extent("sequences", times=heads * -(-width // block)), ONE, ONE)
    shared: dict[str, int | float | str] = {
        "KEY_HEADS": site.axes["key_heads"],
        "KEY_DIM": site.axes["key_dim"],
        "VALUE_HEADS": heads,
        "VALUE_DIM": width,
        "PAGE_SIZE": site.page_size,
        "TABLE_WIDTH": site.table_width,
        "STATE_STRIDE": site.strides["state_out"],
        "QKV_STRIDE": site.strides["qkv"],
        "A_STRIDE": site.strides["a"],
        "B_STRIDE": site.strides["b"],
        "KEYS": max(_CHUNK, power_of_two(site.axes["key_dim"])),
        "BLOCK": block,
    }
    precision, of_inverse = _PRECISION[site.dtypes["qkv"]]
    chunked: dict[str, int | float | str] = {
        "CHUNK": _CHUNK,
        "ROWS": min(_CHUNK, site.page_size),
        "PRECISION": precision,
        "INVERSE_PRECISION": of_inverse,
    }
    rows = scratch_launch(site, delta_rows, shared, by_sequence, num_warps=_WARPS, scratch=found)
    chunks = scratch_launch(
        site, delta_chunks, {**shared, **chunked}, by_sequence, num_warps=_WARPS, scratch=found
    )
    norm = scratch_launch(
        site,
        gated_norm,
        {
            "HEADS": heads,
            "WIDTH": width,
            "EPS": site.attributes["eps"],
            "Z_STRIDE": site.strides["z"],
            "OUT_STRIDE": site.strides["out"],
            "BLOCK_HEADS": norm_heads,
            "BLOCK": power_of_two(width),
        },
        (Extent("tokens", times=-(-heads // norm_heads)), ONE, ONE),
        num_warps=_NORM_WARPS,
        scratch=found,
    )
    most = site.limits.max_num_tokens
    found_bytes = DTYPES["f32"].num_bytes(most * heads * width)
    scratch = {"found": found_bytes}
    return (
        Variant(work=(rows, norm), max_rows=most, kind="decode", scratch=scratch),
        Variant(work=(chunks, norm), max_rows=most, scratch=scratch),
    )
