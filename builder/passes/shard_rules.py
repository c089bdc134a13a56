"""How each operator that works head by head, or channel by channel, is shared by ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trtc.builder.passes.matching import Node, Tensor, input_of, is_fused, is_op, producer
from trtc.builder.passes.rewriter import Rewriter
from trtc.protos.errors import InvariantError


class Part(NamedTuple):
    """Adjacent columns of a tensor (q, k or v)."""

    extent: int
    heads: int = 0
    """Heads that are not divided: where there are fewer than ranks, neighbouring ranks have the
    same one, and of a single one all of them. 0: columns are shared one by one."""
    piece: int = 0
    """Columns of a piece that is not divided, as of a layer. Ranks have as many pieces; where these
    do not divide, the last ranks have some of their neighbours', too. 0: columns divide."""

    def shares(self, ranks: int) -> int:
        """How many different slices the ranks have between them."""
        return min(self.heads or ranks, ranks)

    def share(self, ranks: int) -> int:
        """Columns of a rank."""
        piece = self.piece or 1
        return -(-self.extent // (self.shares(ranks) * piece)) * piece


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
    """Numbers of heads of the cache, or of groups of heads; there may be fewer than ranks."""
    shares_inputs: bool = True
    """Whether a linear that gives one of `reads` computes a rank's share alone. Otherwise the
    operator follows its input, which may be whole."""


def _one(node: Node, width: int) -> Parts:
    return (Part(width),)


def _kv_heads(node: Node, width: int) -> Parts:
    return (Part(width, node.attrs["num_kv_heads"]),)


def _layers(node: Node, width: int) -> Parts:
    return (Part(width, piece=node.attrs["width"]),)


def _thirds(node: Node, width: int) -> Parts:
    return (Part(width // 3),) * 3


def _queries_keys_values(node: Node, width: int) -> Parts:
    keys = Part(node.attrs["key_heads"] * node.attrs["key_dim"])
    return keys, keys, Part(node.attrs["value_heads"] * node.attrs["value_dim"])


def _channels_b_c(node: Node, width: int) -> Parts:
    groups = node.attrs["groups"]
    of_group = Part(groups * node.attrs["state_size"], groups)
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
        {"rate": 0, "dt_bias": 0, "pre_scale": 0},
        ("key_heads", "value_heads"),
    ),
    "mamba2": HeadRule(
        {"xbc": _channels_b_c, "z": _one, "dt": _one},
        {"rate": 0, "dt_bias": 0, "skip": 0, "norm": 0},
        ("heads",),
        ("groups",),
    ),
    "mamba1": HeadRule(
        {"x": _one, "z": _one, "dt": _one},
        {"rate": 1, "dt_bias": 0, "skip": 0},
        ("channels",),
    ),
    "layer_inputs": HeadRule({"projected": _layers}, {"table": 1}),
    "short_conv": HeadRule({"gated": _thirds}, {"weight": 1, "bias": 0}),
    "swiglu": HeadRule({"gate": _one, "up": _one}, {"pre_scale": 0}),
    "quantize": HeadRule({"x": _one}, {"pre_scale": 0}, shares_inputs=False),
    "gather_rows": HeadRule({"x": _one}, {}, shares_inputs=False),
}

_ROWWISE = ("gather_rows", "causal_conv")
"""Operators whose output has the parts of their input."""


def parts_to_be(rewriter: Rewriter, tensor: Tensor) -> Parts | None:
    """The parts of a product of which an operator reads its heads or channels, at once or by a
    Split; None: none does.

    Raises:
        InvariantError: several do, in different parts.
    """
    found = {_parts_read(rewriter, reader, tensor) for reader in tensor.outputs} - {None}
    if len(found) > 1:
        raise InvariantError("is read in different parts", field=tensor.name)
    return found.pop() if found else None


def _parts_read(rewriter: Rewriter, reader: Node, tensor: Tensor) -> Parts | None:
    if is_op(reader, "Split"):
        return _parts_of_outputs(rewriter, reader)
    if any(is_fused(reader, op) for op in _ROWWISE):
        return parts_to_be(rewriter, reader.outputs[0])
    rule = HEAD_RULES.get(reader.op)
    if rule is None or not rule.shares_inputs:
        return None
    reads = {parameter: input_of(reader, parameter) for parameter in rule.reads}
    if any(given is not None and _is_whole(given) for given in reads.values()):
        return None
    width = tensor.shape[1]
    for parameter, parts_of in rule.reads.items():
        if reads[parameter] is tensor:
            return parts_of(reader, width)
    return None


def _is_whole(tensor: Tensor) -> bool:
    """Whether every rank has all of it, though no operator of channels would need more than a
    share: the inputs of layers, which are gathered once for all of them."""
    node = producer(tensor)
    while is_op(node, "Split") or is_fused(node, "gather_rows"):
        assert node is not None
        node = producer(node.inputs[0])
    return is_fused(node, "layer_inputs") or is_fused(node, "all_gather")


def _parts_of_outputs(rewriter: Rewriter, split: Node) -> Parts | None:
    """The parts of all outputs; those of which no share is read stay whole."""
    found = [parts_to_be(rewriter, tensor) for tensor in split.outputs]
    if not any(found):
        return None
    sizes = split_sizes(rewriter, split)
    parts = (parts or (Part(size, heads=1),) for parts, size in zip(found, sizes, strict=True))
    return tuple(part for one in parts for part in one)


def split_sizes(rewriter: Rewriter, split: Node) -> tuple[int, ...]:
    values = rewriter.value(split.inputs[1])
    assert values is not None, f"{split.name} has no sizes"
    return tuple(int(size) for size in values)
