"""Gate and up of a gated MLP with the activation over them, by streamed.cu in one launch."""

from collections.abc import Mapping
from dataclasses import replace

from trtc.plugins.gemm.streamed import CUTS, INTERLEAVED, Cut, cuts_of, launch_of
from trtc.plugins.gemm.tiling import GROUP_ROWS, float_macros
from trtc.plugins.gpu.lowering import Launch, Site, TileMap
from trtc.protos.dtypes import DTYPES

_INPUTS = ("weight_scale", "input_scale", "row_scale", "out_scale")
"""In the order of the kernel's parameters."""
_MULTIPLE = 2 * INTERLEAVED
"""Of the weight's rows: half of them are columns of out, of which 16 in E4M3 are stored at once."""
_PIECE_BYTES = 16
_CUTS: Mapping[tuple[str, str], tuple[Cut, ...]] = {
    **{kind: cuts for kind, cuts in CUTS.items() if kind[1] != "wide"},
    ("f8e4m3", "wide"): (
        Cut(16, 2, stages=7, x_stages=12),
        Cut(32, 2, stages=6, x_stages=12),
        Cut(64, 2, stages=6, x_stages=8),
        Cut(128, 2, stages=6, x_stages=6, run=0),
        Cut(192, 2, stages=5, x_stages=4, run=0),
        Cut(256, 2, stages=4, x_stages=4, run=0),
    ),
    ("bf16", "wide"): (
        Cut(16, 2, stages=6, x_stages=12, run=0),
        Cut(32, 2, stages=6, x_stages=12, run=0),
        Cut(64, 2, stages=6, x_stages=12, run=0),
        Cut(128, 2, stages=8, x_stages=4, run=0),
        Cut(192, 2, stages=5, x_stages=4, run=0),
        Cut(256, 2, stages=4, x_stages=3, run=0),
    ),
}
"""By element type and the weight's shape: those that were faster on an H200 than linear's best and
swiglu after it. Microseconds of an MLP of Llama-3.1-8B's shape, its norm included, with those and
with this (14 layers' weights in a CUDA graph, replayed until the chip was hot):

| rows | 16 | 32 | 64 | 128 | 192 | 256 |
|---|---|---|---|---|---|---|
| E4M3 | 49.8, 47.0 | 49.5, 47.4 | 55.6, 50.7 | 73.9, 61.3 | 105.3, 87.7 | 114.5, 104.4 |
| bf16 | 89.4, 86.9 | 88.6, 86.8 | 95.1, 91.6 | 117.2, 111.0 | 145.6, 135.6 | 177.3, 168.9 |

(bf16 at 16 rows with seven stages.) Up to 8 rows two steps were 0.7 to 1.6 faster in E4M3.

Narrower ones are cut as linear's. With shared experts by them decodes of 128 sequences take 7.42 in
place of 7.49 ms (DeepSeek-V2-Lite, 5,632 rows of the weight) and 13.62 in place of 13.86 (Qwen3.5-
35B-A3B, 1,024 rows); with 256 sequences two steps are as fast.
"""
_ROOM_FOR_BF16: Mapping[int, Cut] = {256: Cut(256, 2, stages=4, x_stages=3, run=0)}
"""By rows: instead of those of E4M3, where out is in bf16 and takes twice the shared memory."""


def gated_launches(site: Site) -> dict[int, Launch]:
    """By the rows they are for at most; none where the kernel cannot run.

    Args:
        site: gated_linear's; of E4M3 with scales of rows, out may be in bf16 without them.
    """
    cuts = cuts_of(site, _CUTS, _MULTIPLE)
    if site.dtypes["out"] != site.dtypes["weight"]:
        cuts = tuple(_ROOM_FOR_BF16.get(cut.rows, cut) for cut in cuts)
    return {cut.rows: gated_launch(site, cut) for cut in cuts}


def gated_launch(site: Site, cut: Cut) -> Launch:
    macros = {
        **float_macros(replace(site, attributes={"softcap": 0.0})),
        "GATED": 1,
        "GELU_TANH": int(site.attributes["activation"] == "gelu_tanh"),
        "HAS_OUT_SCALE": int(site.has("out_scale")),
        "OUT_E4M3": int(site.dtypes["out"] == "f8e4m3"),
    }
    inputs = tuple(name for name in _INPUTS if site.has(name))
    beside = _outbox_bytes(cut, DTYPES[site.dtypes["out"]].num_bytes(1))
    return launch_of(site, cut, inputs, _weight_map(site, cut), macros, beside)


def _outbox_bytes(cut: Cut, element: int) -> int:
    """Results of all groups of a block, each row padded by 16 bytes."""
    row = GROUP_ROWS // 2 * element + _PIECE_BYTES
    return cut.row_groups * cut.rows // cut.splits * row


def _weight_map(site: Site, cut: Cut) -> TileMap:
    """Row 8 a + r of gate is at (r, 0, 0, a), of up at (r, 1, 0, a), and copied in that order."""
    row = DTYPES[site.dtypes["weight"]].num_bytes(site.axes["K"])
    width = site.axes["I"]
    return TileMap(
        parameter="weight",
        sizes=(row, 8, 2, 1, width // 8),
        strides=(row, width * row, width * row, 8 * row),
        box=cut.weight_box,
    )
