"""A native graph as one of several ranks runs it: tensor parallelism as in Megatron-LM
(Shoeybi et al. 2019, arXiv:1909.08053).

    whole x -> q, k, v, gate, up: some columns -> this rank's heads or channels
            -> o, down: some rows -> a part of every sum -> all_reduce -> whole
    whole x -> lm_head: some of the vocabulary -> all_gather -> whole logits

Norms, embedding and routers are whole on every rank, and so is the residual stream. So are latents:
each head reads all of them. Convolutions and recurrences have their states by channels and heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.builder.passes.matching import Node, Tensor, dtype_of, input_of, is_fused, is_op, producer
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.passes.shard_rules import (
    HEAD_RULES,
    HeadRule,
    Part,
    Parts,
    parts_to_be,
    split_sizes,
)
from trtc.builder.recipes import Constant, OnFirstRank, Recipe, Reshape, Shard
from trtc.plugins.registry import REGISTRY
from trtc.protos.errors import InvariantError
from trtc.protos.kv import CacheLayout


@dataclass(frozen=True)
class ShardOverRanks:
    """A pass: the graph of rank 0, from which the others' differ in what their weights hold alone
    (`recipe_of_rank`).

    Rules, for R ranks; a tensor is parted when a rank has only some of its columns:
        linear(whole) read by an operator of heads or channels -> 1 / R of its columns, parted
        linear(whole) that gives a graph output       -> 1 / R of its columns, then all_gather
        linear(parted)  -> this rank's channels, then all_reduce; its bias on rank 0 alone
        moe(whole)      -> 1 / R of each expert's channels, or of the experts, then all_reduce; of
                           a shared expert's result it adds the rank's part, which is not reduced
                           alone
        operators of HEAD_RULES -> 1 / R of the heads or channels, parted; a row that has one scale
                           of its own gets one on each rank
        causal_conv     -> 1 / R of the channels of each part that its reader has, parted
        mamba2 with a single group -> as above, but B and C are whole, and the norm is rms_scale by
                           the squares of all heads, after an all_reduce
        layer_inputs    -> as many layers on each rank, then all_gather
        gather_columns(parted) -> all_gather, then whole; the linear that reads it (whose groups of
                           channels are scattered over the ranks) has 1 / R of its columns, then
                           all_gather
        rms_norm(whole) read by an operator of heads -> whole, then gather_columns of its own
        Split of what is parted -> parted, but for outputs that no operator of heads reads
    All else is whole. A graph that has collectives is sharded already and stays as it is.
    """

    ranks: int
    ep: bool = False
    """Whether a rank has whole experts, and not its share of each: expert parallelism."""
    name: str = "shard"
    requires: frozenset[str] = frozenset({"gather_early", "fuse_quantize", "verify_native"})

    def __call__(self, module: Module) -> tuple[Module, bool]:
        rewriter = Rewriter(module)
        if any(is_fused(node, op) for node in rewriter.graph.nodes for op in _COLLECTIVES):
            return module, False
        walk = _Walk(rewriter, self.ranks, self.ep)
        kv = module.kv.of_rank(self.ranks, walk.whole_channels(module.kv))
        pools = {place.name: list(kv.pool_shape(place)) for place in kv.places}
        for tensor in (*rewriter.graph.inputs, *rewriter.graph.outputs):
            shape = pools.get(tensor.name.removesuffix("_out"))
            if shape is not None:
                tensor.shape = shape
        for node in list(rewriter.graph.nodes):
            walk.visit(node)
        return replace(rewriter.module(), kv=kv), True


_COLLECTIVES = ("all_reduce", "all_gather")


class _Walk:
    """Visits the nodes in order and remembers of which tensors a rank reads its share. A share may
    be all of a tensor, of which every rank has the only head."""

    def __init__(self, rewriter: Rewriter, ranks: int, ep: bool) -> None:
        self._rewriter = rewriter
        self._ranks = ranks
        self._ep = ep
        self._parted: dict[str, Parts] = {}

    def visit(self, node: Node) -> None:
        if is_op(node, "Split"):
            self._split(node)
            return
        if node.op in _RULES:
            _RULES[node.op](self, node)
        elif node.op in HEAD_RULES:
            self._heads(node, HEAD_RULES[node.op])
        else:
            self._whole(node)
        if node.domain == TRTC_DOMAIN:
            self._rewriter.retype(node)

    def whole_channels(self, kv: CacheLayout) -> dict[int, int]:
        """Of each layer's convolution, the channels that every rank has."""
        layers = {place.name: place.entry.layer for place in kv.places}
        found = {}
        for node in self._rewriter.fused_nodes("causal_conv"):
            parts = parts_to_be(self._rewriter, node.outputs[0]) or ()
            whole = sum(part.extent for part in parts if part.shares(self._ranks) == 1)
            state = input_of(node, "state")
            assert state is not None
            found[layers[state.name]] = whole
        return found

    def share(self, extent: int, where: str) -> int:
        """A rank's share of `extent`."""
        return self._share_of(Part(extent), where)

    def _share_of(self, part: Part, where: str, unit: int = 1) -> int:
        shares = part.shares(self._ranks)
        rest = part.piece % unit if part.piece else part.extent % (unit * shares)
        if rest or self._ranks % shares:
            raise InvariantError(
                f"{part.extent} in units of {unit} by {self._ranks} ranks", field=where
            )
        return part.share(self._ranks)

    def _shard(self, source: Recipe, axis: int, parts: Parts, group: int = 1) -> Shard:
        shares = tuple(part.shares(self._ranks) for part in parts)
        extents = tuple(part.extent // group for part in parts)
        pieces = tuple(part.piece // group or 1 for part in parts)
        return Shard(source, axis, extents, self._ranks, shares=shares, pieces=pieces)

    def _is_parted(self, tensor: Tensor) -> bool:
        return any(part.shares(self._ranks) > 1 for part in self._parted.get(tensor.name, ()))

    def _whole(self, node: Node) -> None:
        for tensor in node.inputs:
            if self._is_parted(tensor):
                raise InvariantError(f"{node.op} needs the whole of {tensor.name}", field=node.name)

    def _linear(self, node: Node) -> None:
        x, out = node.inputs[0], node.outputs[0]
        if self._is_parted(x):
            self._linear_by_depth(node, self._parted[x.name])
        elif self._rewriter.is_output(out) or _reads_all_ranks(x):
            self._linear_by_columns(node, (Part(node.attrs["N"]),))
            self._gather(node)
        elif (parts := parts_to_be(self._rewriter, out)) is not None:
            self._linear_by_columns(node, parts)
            self._parted[out.name] = parts

    def _linear_by_columns(self, node: Node, parts: Parts) -> None:
        for name in ("weight", "weight_scale", "weight_zero", "scale_unit", "bias"):
            self._cut(node, name, 0, parts)
        node.attrs["N"] = sum(self._share_of(part, node.name) for part in parts)

    def _linear_by_depth(self, node: Node, parts: Parts) -> None:
        for name in ("weight", "weight_scale", "weight_zero"):
            self._cut(node, name, 1, parts)
        self._on_first_rank(node, "bias")
        if node.attrs.get("softcap"):
            raise InvariantError("a softcap needs the whole sum", field=node.name)
        self._reduce(node)

    def _on_first_rank(self, node: Node, parameter: str) -> None:
        """Leave a bias to rank 0: the sum over ranks has it once."""
        bias = input_of(node, parameter)
        if bias is not None:
            recipe = OnFirstRank(self._rewriter.recipes[bias.name])
            self._set_weight(node, parameter, bias, recipe, bias.shape)

    def _moe(self, node: Node) -> None:
        self._whole(node)
        if self._ep:
            self._whole_experts(node)
        else:
            self._channels_of_experts(node)
        shared = input_of(node, "shared")
        if shared is not None:
            reduce = producer(shared)
            if not is_fused(reduce, "all_reduce") or self._rewriter.sole_consumer(shared) is None:
                raise InvariantError("every rank would add the shared expert", field=node.name)
            assert reduce is not None
            self._rewriter.set_input(node, "shared", reduce.inputs[0])
        self._reduce(node)

    def _channels_of_experts(self, node: Node) -> None:
        width = node.attrs["I"]
        of_rows = ("gate_up_scale", "gate_up_zero", "gate_up_scale_unit", "gate_up_bias")
        for name in ("gate_up", *of_rows):
            self._cut(node, name, 1, (Part(width),) * node.attrs.get("parts", 2))
        for name in ("down", "down_scale", "down_zero"):
            self._cut(node, name, 2, (Part(width),))
        self._cut(node, "down_pre_scale", 1, (Part(width),))
        self._on_first_rank(node, "down_bias")
        node.attrs["I"] = self.share(width, node.name)

    def _whole_experts(self, node: Node) -> None:
        """Neighbouring experts on each rank, with a map from the router's numbers to theirs."""
        experts = int(node.inputs[1].shape[1])
        of_rank = self.share(experts, node.name)
        for parameter in REGISTRY["moe"].inputs:
            if parameter.axes[0] == "L":
                self._cut(node, parameter.name, 0, (Part(experts),))
        here = np.arange(experts, dtype=np.int32) - of_rank * np.arange(self._ranks)[:, None]
        maps = np.where((here >= 0) & (here < of_rank), here, -1).astype(np.int32)
        recipe = Reshape(Shard(Constant(maps), 0, (self._ranks,), self._ranks), (experts,))
        name = f"{node.name}.expert_map.shard"
        weight = self._rewriter.weight(name, recipe, "i32", [experts])
        self._rewriter.set_input(node, "expert_map", weight)

    def _heads(self, node: Node, rule: HeadRule) -> None:
        """Inputs, weights and output of an operator of heads or channels are this rank's."""
        given = {
            parameter: tensor
            for parameter in rule.reads
            if (tensor := input_of(node, parameter)) is not None
        }
        if not rule.attributes and not any(map(self._is_parted, given.values())):
            return
        for parameter, tensor in given.items():
            if tensor.name not in self._parted:
                raise InvariantError(f"needs this rank's share of {parameter}", field=node.name)
        of_input = self._parted[next(iter(given.values())).name]
        for name, axis in rule.weights.items():
            weight = input_of(node, name)
            if weight is not None:
                self._cut(node, name, axis, _parts_of(weight.shape[axis], of_input))
        for name in set(rule.attributes) & set(node.attrs):
            node.attrs[name] = self.share(node.attrs[name], node.name)
        for name in set(rule.few) & set(node.attrs):
            heads = int(node.attrs[name])
            node.attrs[name] = self._share_of(Part(heads, heads), node.name)
        if node.attrs.get("scales", 0) > 1:
            node.attrs["scales"] = self.share(node.attrs["scales"], node.name)
        self._part_output(node, of_input)

    def _causal_conv(self, node: Node) -> None:
        parts = self._parted[node.inputs[0].name]
        self._cut(node, "weight", 1, parts)
        self._cut(node, "bias", 0, parts)
        self._part_output(node, parts)

    def _layer_inputs(self, node: Node) -> None:
        """The table is cut by layers, and what it gives gathered once a step. The products of each
        layer that it goes to are small, and whole on every rank: no layer adds up one more sum.
        """
        layers, columns = node.outputs[0], node.attrs["width"]
        number = layers.shape[1] // columns
        self._heads(node, HEAD_RULES["layer_inputs"])
        (part,) = self._parted.pop(layers.name)
        of_rank = part.share(self._ranks) // columns
        self._gather(node)
        split = self._rewriter.sole_consumer(layers, "Split")
        if split is None:
            raise InvariantError("is not read layer by layer", field=layers.name)
        slots = self._ranks * of_rank
        outputs = [
            self._rewriter.variable(
                f"{split.name}.again.{slot}", dtype_of(layers), [layers.shape[0], columns]
            )
            for slot in range(slots)
        ]
        for layer, tensor in enumerate(split.outputs):
            rank = layer // of_rank
            begin = min(rank * of_rank, number - of_rank)
            outputs[rank * of_rank + layer - begin] = tensor
        sizes = np.full(slots, columns, np.int64)
        split.inputs[1] = self._rewriter.constant(f"{split.inputs[1].name}.shard", sizes, "i64")
        split.outputs = outputs

    def _mamba2(self, node: Node) -> None:
        groups = node.attrs["groups"]
        width = node.outputs[0].shape[1]
        self._heads(node, HEAD_RULES["mamba2"])
        if groups % self._ranks:
            if groups > 1:
                raise InvariantError(f"{groups} groups by {self._ranks} ranks", field=node.name)
            self._norm_over_ranks(node, width)

    def _norm_over_ranks(self, node: Node, width: int) -> None:
        """Each rank gives the squares of its heads, and scales its heads by the sum of all."""
        out, norm = node.outputs[0], input_of(node, "norm")
        rows = out.shape[0]
        given = self._rewriter.variable(f"{node.name}.gated", dtype_of(out), out.shape)
        squares, total = (
            self._rewriter.variable(f"{node.name}.{name}", "f32", [rows, 1])
            for name in ("squares", "total")
        )
        node.outputs[0] = given
        self._rewriter.clear_input(node, "norm")
        self._rewriter.give_output(node, "squares", squares)
        self._rewriter.retype(node)
        self._rewriter.fused(
            "all_reduce",
            f"{node.name}.all_reduce",
            {"x": squares},
            {"out": total},
            {"ranks": self._ranks},
        )
        self._rewriter.fused(
            "rms_scale",
            f"{node.name}.norm",
            {"x": given, "squares": total, "weight": norm},
            {"out": out},
            {"width": width, "eps": node.attrs["eps"]},
        )

    def _rms_norm(self, node: Node) -> None:
        """Of whole rows: what it normalises is whole on every rank, which reads its heads of the
        result (OLMo 2, MiniMax-M2)."""
        self._whole(node)
        whole = node.outputs[0]
        parts = parts_to_be(self._rewriter, whole)
        if parts is None:
            return
        normed = self._rewriter.variable(f"{node.name}.whole", dtype_of(whole), whole.shape)
        node.outputs[0] = normed
        columns = self._rewriter.weight(
            f"{node.name}.columns.shard",
            self._shard(Constant(np.arange(whole.shape[1], dtype=np.int32)), 0, parts),
            "i32",
            [sum(self._share_of(part, node.name) for part in parts)],
        )
        self._rewriter.fused(
            "gather_columns",
            f"{node.name}.share",
            {"x": normed, "columns": columns},
            {"out": whole},
            {},
        )
        self._parted[whole.name] = parts

    def _gather_columns(self, node: Node) -> None:
        """An order of channels that mixes the ranks' own needs all of them."""
        x = node.inputs[0]
        if not self._is_parted(x):
            return
        width = sum(part.extent for part in self._parted[x.name])
        whole = self._rewriter.variable(f"{node.name}.whole", dtype_of(x), [x.shape[0], width])
        self._rewriter.fused(
            "all_gather",
            f"{node.name}.all_gather",
            {"x": x},
            {"out": whole},
            {"ranks": self._ranks},
        )
        self._rewriter.set_input(node, "x", whole)

    def _part_output(self, node: Node, of_input: Parts) -> None:
        out = node.outputs[0]
        self._parted[out.name] = _parts_of(out.shape[1], of_input)

    def _split(self, node: Node) -> None:
        source = node.inputs[0]
        if source.name not in self._parted:
            return
        parts = list(self._parted[source.name])
        shared = []
        for tensor, size in zip(node.outputs, split_sizes(self._rewriter, node), strict=True):
            own: list[Part] = []
            while sum(part.extent for part in own) < size:
                own.append(parts.pop(0))
            shared.append(sum(self._share_of(part, node.name) for part in own))
            tensor.shape = [source.shape[0], shared[-1]]
            self._parted[tensor.name] = tuple(own)
        node.inputs[1] = self._rewriter.constant(
            f"{node.inputs[1].name}.shard", np.array(shared, np.int64), "i64"
        )

    def _cut(self, node: Node, parameter: str, axis: int, parts: Parts) -> None:
        """Leave this rank's pieces of a weight; `parts` are channels, of which a scale may have one
        for a group of them, or one for all."""
        tensor = input_of(node, parameter)
        extent = sum(part.extent for part in parts)
        if tensor is None or (tensor.shape[axis] == 1 and extent > 1):
            return
        group = extent // tensor.shape[axis]
        where = f"{node.name}.{parameter}"
        shape = list(tensor.shape)
        shape[axis] = sum(self._share_of(part, where, group) for part in parts) // group
        recipe = self._shard(self._rewriter.recipes[tensor.name], axis, parts, group)
        self._set_weight(node, parameter, tensor, recipe, shape)

    def _set_weight(
        self, node: Node, parameter: str, whole: Tensor, recipe: Recipe, shape: list[int]
    ) -> None:
        name = f"{whole.name}.shard"
        weight = self._rewriter.weight(name, recipe, dtype_of(whole), shape)
        self._rewriter.set_input(node, parameter, weight)

    def _reduce(self, node: Node) -> None:
        if input_of(node, "residual") is not None:
            raise InvariantError("every rank would add the residual", field=node.name)
        self._collect("all_reduce", node, "partial")

    def _gather(self, node: Node) -> None:
        self._collect("all_gather", node, "shard")

    def _collect(self, op: str, node: Node, given: str) -> None:
        """Put a collective behind a node: it takes over the node's output."""
        whole = node.outputs[0]
        part = self._rewriter.variable(f"{node.name}.{given}", dtype_of(whole), whole.shape)
        node.outputs[0] = part
        self._rewriter.retype(node)
        self._rewriter.fused(
            op, f"{node.name}.{op}", {"x": part}, {"out": whole}, {"ranks": self._ranks}
        )


def _reads_all_ranks(x: Tensor) -> bool:
    """Whether x is what a gather_columns, and perhaps a quantize after it, has of all ranks."""
    source = producer(x)
    if source is not None and is_fused(source, "quantize"):
        source = producer(source.inputs[0])
    if source is None or not is_fused(source, "gather_columns"):
        return False
    return is_fused(producer(source.inputs[0]), "all_gather")


def _parts_of(width: int, of_input: Parts) -> Parts:
    """Of a weight or an output: its input's parts, where it is as wide."""
    return of_input if sum(part.extent for part in of_input) == width else (Part(width),)


_RULES: Mapping[str, Callable[[_Walk, Node], None]] = {
    "linear": _Walk._linear,
    "moe": _Walk._moe,
    "causal_conv": _Walk._causal_conv,
    "gather_columns": _Walk._gather_columns,
    "layer_inputs": _Walk._layer_inputs,
    "mamba2": _Walk._mamba2,
    "rms_norm": _Walk._rms_norm,
}
