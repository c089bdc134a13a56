"""mamba1 for GPUs: one launch, in which rows of a sequence go one at a time."""

from trtc.plugins.gpu.lowering import ONE, Extent, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.plugins.mamba1.triton import scan_rows

_STATES = 2048
"""Elements of the states of a program, in registers beside as many rates."""
_LEAST, _MOST = 16, 128
"""Channels of a program."""
_WARPS = 4


def lower(site: Site) -> tuple[Variant, ...]:
    channels, keys = site.axes["channels"], power_of_two(site.axes["state_size"])
    block = min(_MOST, max(_LEAST, _STATES // keys), max(_LEAST, power_of_two(channels)))
    launch = scratch_launch(
        site,
        scan_rows,
        {
            "CHANNELS": channels,
            "STATE_SIZE": site.axes["state_size"],
            "PAGE_SIZE": site.page_size,
            "TABLE_WIDTH": site.table_width,
            "STATE_STRIDE": site.strides["state_out"],
            "X_STRIDE": site.strides["x"],
            "Z_STRIDE": site.strides["z"],
            "DT_STRIDE": site.strides["dt"],
            "B_STRIDE": site.strides["b"],
            "C_STRIDE": site.strides["c"],
            "OUT_STRIDE": site.strides["out"],
            "KEYS": keys,
            "BLOCK": block,
        },
        (Extent("sequences", times=-(-channels // block)), ONE, ONE),
        num_warps=_WARPS,
        scratch={},
    )
    return (Variant(work=(launch,), max_rows=site.limits.max_num_tokens),)
