"""How operators that are convolutions are lowered for a GPU."""

from trtc.plugins.convolution.triton import convolution, convolution_decode, keep_state
from trtc.plugins.gpu.lowering import ONE, Extent, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.protos.dtypes import DTYPES

_BLOCK = 256
"""Channels of a program."""
_ROWS = 8
"""Of a tile."""
_NUM_WARPS = 4


def lower_convolution(site: Site, inputs: str, *, gated: bool) -> tuple[Variant, ...]:
    """One kernel for steps of one token per sequence, and two for any step.

    Args:
        inputs: name of the parameter that is convolved.
        gated: whether it also holds the gates, as short_conv's does.
    """
    channels, columns = site.axes["channels"], site.axes["columns"]
    block = min(_BLOCK, power_of_two(channels))
    parts = -(-channels // block)
    shared = {
        "CHANNELS": channels,
        "COLUMNS": columns,
        "PAGE_SIZE": site.page_size,
        "STATE_STRIDE": site.strides["state_out"],
        "INPUT_STRIDE": site.strides[inputs],
        "GATED": gated,
        "BLOCK": block,
    }
    reading = {**shared, "TABLE_WIDTH": site.table_width}
    writing = {"OUT_STRIDE": site.strides["out"]}
    by_sequence = (Extent("sequences", times=parts), ONE, ONE)
    tiles = (Extent("tokens", block=_ROWS, times=parts, plus="sequences"), ONE, ONE)
    dtype = site.dtypes["state_out"]
    kept = {"kept": dtype}
    renamed = {"inputs": inputs}
    most = site.limits.max_num_tokens
    decode = scratch_launch(
        site,
        convolution_decode,
        {**reading, **writing},
        by_sequence,
        num_warps=_NUM_WARPS,
        scratch={},
        renamed=renamed,
    )
    pair = (
        scratch_launch(
            site,
            keep_state,
            reading,
            by_sequence,
            num_warps=_NUM_WARPS,
            scratch=kept,
            renamed=renamed,
        ),
        scratch_launch(
            site,
            convolution,
            {**shared, **writing, "ROWS": _ROWS},
            tiles,
            num_warps=_NUM_WARPS,
            scratch=kept,
            renamed=renamed,
        ),
    )
    kept_bytes = DTYPES[dtype].num_bytes(site.limits.max_batch_size * columns * channels)
    return (
        Variant(work=(decode,), max_rows=most, kind="decode"),
        Variant(work=pair, max_rows=most, scratch={"kept": kept_bytes}),
    )
