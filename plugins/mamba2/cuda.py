"""mamba2 for GPUs: the recurrence, then the gated norm over groups of heads."""

from trtc.plugins.gpu.lowering import ONE, Extent, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.plugins.mamba2.triton import gated_norm, ssm_chunks, ssm_rows
from trtc.protos.dtypes import DTYPES

_BLOCK = 32
"""Columns of a head's state in a program: 16 KB of registers, of a state of 128."""
_WARPS = 4
_LEAST = 16
"""Rows and columns of a product of matrices."""
_CHUNK = {"f32": 16, "bf16": 64}
"""Rows, by the type of activations."""
_WIDE_STATE, _WIDE_CHUNK = 128, 32
"""Beside larger states chunks of bf16 have fewer rows, as B, C and the state share memory."""
_PRECISION = {"f32": "ieee", "bf16": "tf32"}
"""Of products with the state."""
_NORM_BLOCK = 1024
"""Columns that four warps take of a group."""


def lower(site: Site) -> tuple[Variant, ...]:
    heads, dim, groups = (site.axes[name] for name in ("heads", "head_dim", "groups"))
    found = {"found": "f32"}
    dtype, keys = site.dtypes["xbc"], power_of_two(site.axes["state_size"])
    block = min(_BLOCK, max(_LEAST, power_of_two(dim)))
    by_sequence = (Extent("sequences", times=heads * -(-dim // block)), ONE, ONE)
    shared: dict[str, int | float | str] = {
        "HEADS": heads,
        "HEAD_DIM": dim,
        "GROUPS": groups,
        "STATE_SIZE": site.axes["state_size"],
        "DT_MIN": site.attributes["dt_min"],
        "DT_MAX": site.attributes["dt_max"],
        "PAGE_SIZE": site.page_size,
        "TABLE_WIDTH": site.table_width,
        "STATE_STRIDE": site.strides["state_out"],
        "XBC_STRIDE": site.strides["xbc"],
        "DT_STRIDE": site.strides["dt"],
        "KEYS": max(_LEAST, keys),
        "BLOCK": block,
    }
    most = _CHUNK[dtype] if keys <= _WIDE_STATE else min(_WIDE_CHUNK, _CHUNK[dtype])
    chunk = max(_LEAST, min(most, site.page_size))
    chunked: dict[str, int | float | str] = {
        "CHUNK": chunk,
        "ROWS": min(chunk, site.page_size),
        "PRECISION": _PRECISION[dtype],
    }
    rows = scratch_launch(site, ssm_rows, shared, by_sequence, num_warps=_WARPS, scratch=found)
    chunks = scratch_launch(
        site, ssm_chunks, {**shared, **chunked}, by_sequence, num_warps=_WARPS, scratch=found
    )
    width = heads * dim // groups
    norm = scratch_launch(
        site,
        gated_norm,
        {
            "GROUPS": groups,
            "WIDTH": width,
            "EPS": site.attributes["eps"],
            "Z_STRIDE": site.strides["z"],
            "OUT_STRIDE": site.strides["out"],
            "SQUARES_STRIDE": site.strides.get("squares", 0),
            "BLOCK": power_of_two(width),
        },
        (Extent("tokens", times=groups), ONE, ONE),
        num_warps=min(32, max(1, 4 * power_of_two(width) // _NORM_BLOCK)),
        scratch=found,
    )
    rows_at_most = site.limits.max_num_tokens
    scratch = {"found": DTYPES["f32"].num_bytes(rows_at_most * heads * dim)}
    return (
        Variant(work=(rows, norm), max_rows=rows_at_most, kind="decode", scratch=scratch),
        Variant(work=(chunks, norm), max_rows=rows_at_most, scratch=scratch),
    )
