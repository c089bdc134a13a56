"""Grid sizes of each operator's kernel: the numbers of its tensorrt.py's symbolic expressions."""

from collections.abc import Callable, Mapping

from trtc.plugins.attention.split_kv import TENSORRT
from trtc.protos.bundle import KernelFacts

Grid = Callable[[KernelFacts, Mapping[str, int], int], tuple[int, int]]
"""(kernel, extents of the step by axis symbol, tokens of a page) -> programs along x and y."""


def _kv_write(kernel: KernelFacts, extents: Mapping[str, int], page_size: int) -> tuple[int, int]:
    return extents["T"], 1


def _paged_attention(
    kernel: KernelFacts, extents: Mapping[str, int], page_size: int
) -> tuple[int, int]:
    return _tiles(kernel, extents), int(kernel.attributes["num_kv_heads"])


def _attention_split(
    kernel: KernelFacts, extents: Mapping[str, int], page_size: int
) -> tuple[int, int]:
    most = min(int(kernel.attributes["splits"]), -(-extents["P"] * page_size // TENSORRT.keys))
    return _tiles(kernel, extents), most * int(kernel.attributes["num_kv_heads"])


def _attention_combine(
    kernel: KernelFacts, extents: Mapping[str, int], page_size: int
) -> tuple[int, int]:
    return extents["T"], -(-int(kernel.attributes["num_heads"]) // kernel.rows)


def _tiles(kernel: KernelFacts, extents: Mapping[str, int]) -> int:
    return -(-extents["T"] // kernel.rows) + extents["B"]


GRIDS: Mapping[str, Grid] = {
    "kv_write": _kv_write,
    "paged_attention": _paged_attention,
    "attention_split": _attention_split,
    "attention_combine": _attention_combine,
}
