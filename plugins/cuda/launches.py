"""How many programs each operator's kernel takes: what its tensorrt.py says in symbols."""

from collections.abc import Callable, Mapping

from trtc.protos.bundle import KernelFacts

Grid = Callable[[KernelFacts, int, int], tuple[int, int]]
"""(kernel, tokens of the step, sequences) -> programs along x and y."""


def _kv_write(kernel: KernelFacts, num_tokens: int, num_sequences: int) -> tuple[int, int]:
    return num_tokens, 1


def _paged_attention(kernel: KernelFacts, num_tokens: int, num_sequences: int) -> tuple[int, int]:
    tiles = -(-num_tokens // kernel.rows) + num_sequences
    return tiles, int(kernel.attributes["num_kv_heads"])


GRIDS: Mapping[str, Grid] = {"kv_write": _kv_write, "paged_attention": _paged_attention}
