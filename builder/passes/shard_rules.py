"""How each operator that works head by head, or channel by channel, is shared by ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trtc.builder.passes.matching import Node


class Part(NamedTuple):
    """Adjacent columns of a tensor (q, k or v)."""

    extent: int
    heads: int = 0
    """Heads that are not divided: where there are fewer than ranks, neighbouring ranks have the
    same one, and of a single one all of them. 0: columns are shared one by one."""

    def shares(self, ranks: int) -> int:
        """How many different slices the ranks have between them."""
        return min(self.heads or ranks, ranks)


Parts = tuple[Part, ...]
PartsOf = Callable[[Node, int], Parts]
"""The parts of an input of a node, given its width."""


@dataclass(frozen=True)
class HeadRule:
    """An operator of which a rank computes some heads or channels.

    All that is not named here, each rank has whole.
    """

    reads: Mapping[str, PartsOf]
    """Inputs of which a rank reads its share. The first one's parts are those of the output, where
    both are of one width; else the output has one part."""
    weights: Mapping[str, int]
    """Weights of which a rank has its share, and the axis of heads or channels."""
    attributes: tuple[str, ...] = ()
    """Numbers of heads or channels."""
    few: tuple[str, ...] = ()
    """Numbers of heads of the cache; there may be fewer than ranks."""
    shares_inputs: bool = True
    """Whether a linear that gives one of `reads` computes a rank's share alone. Otherwise the
    operator follows its input, which may be whole."""


def _one(node: Node, width: int) -> Parts:
    return (Part(width),)


def _kv_heads(node: Node, width: int) -> Parts:
    return (Part(width, node.attrs["num_kv_heads"]),)


def _thirds(node: Node, width: int) -> Parts:
    return (Part(width // 3),) * 3


def _queries_keys_values(node: Node, width: int) -> Parts:
    keys = Part(node.attrs["key_heads"] * node.attrs["key_dim"])
    return keys, keys, Part(node.attrs["value_heads"] * node.attrs["value_dim"])


def _channels_b_c(node: Node, width: int) -> Parts:
    of_group = Part(node.attrs["groups"] * node.attrs["state_size"])
    return Part(node.attrs["heads"] * node.attrs["head_dim"]), of_group, of_group


HEAD_RULES: Mapping[str, HeadRule] = {
    "rope": HeadRule({"q": _one}, {}, ("num_heads",)),
    "rope_kv_write": HeadRule(
        {"q": _one, "k": _kv_heads, "v": _kv_heads}, {}, ("num_heads",), ("num_kv_heads",)
    ),
    "paged_attention": HeadRule(
        {"q": _one},
        {"pre_scale": 0, "sinks": 0},
        ("num_heads",),
        ("num_kv_heads",),
        shares_inputs=False,
    ),
    "latent_kv_write": HeadRule({"q": _one}, {}, ("num_heads",)),
    "latent_attention": HeadRule({"q": _one}, {}, ("num_heads",), shares_inputs=False),
    "head_linear": HeadRule({"x": _one}, {"weight": 0}, shares_inputs=False),
    "gated_delta": HeadRule(
        {"qkv": _queries_keys_values, "z": _one, "b": _one, "a": _one},
        {"rate": 0, "dt_bias": 0},
        ("key_heads", "value_heads"),
    ),
    "mamba2": HeadRule(
        {"xbc": _channels_b_c, "z": _one, "dt": _one},
        {"rate": 0, "dt_bias": 0, "skip": 0, "norm": 0},
        ("heads", "groups"),
    ),
    "mamba1": HeadRule(
        {"x": _one, "z": _one, "dt": _one},
        {"rate": 1, "dt_bias": 0, "skip": 0},
        ("channels",),
    ),
    "short_conv": HeadRule({"gated": _thirds}, {"weight": 1, "bias": 0}),
    "swiglu": HeadRule({"gate": _one, "up": _one}, {"pre_scale": 0}),
    "quantize": HeadRule({"x": _one}, {"pre_scale": 0}, shares_inputs=False),
    "gather_rows": HeadRule({"x": _one}, {}, shares_inputs=False),
}
