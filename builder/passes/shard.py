"""A native graph as one of several ranks runs it: tensor parallelism as in Megatron-LM
(Shoeybi et al. 2019, arXiv:1909.08053).

    whole x -> q, k, v, gate, up: some columns -> this rank's heads or channels
            -> o, down: some rows -> a part of every sum -> all_reduce -> whole
    whole x -> lm_head: some of the vocabulary -> all_gather -> whole logits

Norms, embedding and routers are whole on every rank, and so is the residual stream.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.builder.passes.matching import Node, Tensor, dtype_of, input_of, is_fused, is_op, producer
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.recipes import OnFirstRank, Recipe, Shard
from trtc.protos.errors import InvariantError

Parts = tuple[int, ...]
"""Extents of what lies side by side in a tensor's columns (q, k, v): a rank has a piece of each."""

_READERS_OF_PARTS = ("rope", "rope_kv_write", "swiglu")


@dataclass(frozen=True)
class ShardOverRanks:
    """A pass: the graph of rank 0, from which the others' differ in what their weights hold alone
    (`recipe_of_rank`).

    Rules, for R ranks; a tensor is parted when a rank has only some of its columns:
        linear(whole) read by rope, rope_kv_write or swiglu -> 1 / R of its columns, parted
        linear(whole) that gives a graph output       -> 1 / R of its columns, then all_gather
        linear(parted)  -> this rank's channels, then all_reduce; its bias on rank 0 alone
        moe(whole)      -> 1 / R of each expert's channels, then all_reduce; of a shared expert's
                           result it adds the rank's part, which is not reduced alone
        rope, rope_kv_write, paged_attention -> 1 / R of the heads, parted
        swiglu, quantize, gather_rows, Split of what is parted -> parted, pre-scales too; a row that
                           has one scale of its own gets one on each rank
    All else is whole. A graph that has collectives is sharded already and stays as it is.
    """

    ranks: int
    name: str = "shard"
    requires: frozenset[str] = frozenset({"gather_early", "fuse_quantize", "verify_native"})

    def __call__(self, module: Module) -> tuple[Module, bool]:
        rewriter = Rewriter(module)
        if any(is_fused(node, op) for node in rewriter.graph.nodes for op in _COLLECTIVES):
            return module, False
        walk = _Walk(rewriter, self.ranks)
        for tensor in (*rewriter.graph.inputs, *rewriter.graph.outputs):
            if tensor.name.startswith("kv_"):
                heads = walk.share(tensor.shape[3], "KV heads")
                tensor.shape = [*tensor.shape[:3], heads, tensor.shape[4]]
        for node in list(rewriter.graph.nodes):
            walk.visit(node)
        return replace(rewriter.module(), kv=module.kv.of_rank(self.ranks)), True


_COLLECTIVES = ("all_reduce", "all_gather")


class _Walk:
    """Visits the nodes in order and remembers which tensors are parted."""

    def __init__(self, rewriter: Rewriter, ranks: int) -> None:
        self._rewriter = rewriter
        self._ranks = ranks
        self._parted: dict[str, Parts] = {}

    def visit(self, node: Node) -> None:
        if is_op(node, "Split"):
            self._split(node)
            return
        _RULES.get(node.op, _Walk._whole)(self, node)
        if node.domain == TRTC_DOMAIN:
            self._rewriter.retype(node)

    def share(self, extent: int, where: str, unit: int = 1) -> int:
        """A rank's share of `extent`, in whole units."""
        if extent % (unit * self._ranks):
            raise InvariantError(f"{extent} in units of {unit} by {self._ranks} ranks", field=where)
        return extent // self._ranks

    def _whole(self, node: Node) -> None:
        for tensor in node.inputs:
            if tensor.name in self._parted:
                raise InvariantError(f"{node.op} needs the whole of {tensor.name}", field=node.name)

    def _linear(self, node: Node) -> None:
        x, out = node.inputs[0], node.outputs[0]
        if x.name in self._parted:
            self._linear_by_depth(node, self._parted[x.name])
        elif self._rewriter.is_output(out):
            self._linear_by_columns(node, (node.attrs["N"],))
            self._gather(node)
        elif (parts := self._parts_to_be(out)) is not None:
            self._linear_by_columns(node, parts)
            self._parted[out.name] = parts

    def _parts_to_be(self, tensor: Tensor) -> Parts | None:
        """The parts of a product that attention or an MLP reads, at once or by a Split."""
        readers = list(tensor.outputs)
        split = readers[0] if len(readers) == 1 and is_op(readers[0], "Split") else None
        if split is not None:
            readers = [reader for part in split.outputs for reader in part.outputs]
        if not any(is_fused(reader, op) for reader in readers for op in _READERS_OF_PARTS):
            return None
        return (tensor.shape[1],) if split is None else self._sizes(split)

    def _linear_by_columns(self, node: Node, parts: Parts) -> None:
        for name in ("weight", "weight_scale", "weight_zero", "bias"):
            self._cut(node, name, 0, parts)
        node.attrs["N"] = self.share(node.attrs["N"], node.name)

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
        width = node.attrs["I"]
        for name in ("gate_up", "gate_up_scale", "gate_up_zero", "gate_up_bias"):
            self._cut(node, name, 1, (width,) * node.attrs.get("parts", 2))
        for name in ("down", "down_scale", "down_zero"):
            self._cut(node, name, 2, (width,))
        self._cut(node, "down_pre_scale", 1, (width,))
        self._on_first_rank(node, "down_bias")
        node.attrs["I"] = self.share(width, node.name)
        shared = input_of(node, "shared")
        if shared is not None:
            reduce = producer(shared)
            if not is_fused(reduce, "all_reduce") or self._rewriter.sole_consumer(shared) is None:
                raise InvariantError("every rank would add the shared expert", field=node.name)
            assert reduce is not None
            self._rewriter.set_input(node, "shared", reduce.inputs[0])
        self._reduce(node)

    def _heads(self, node: Node) -> None:
        """rope, rope_kv_write and paged_attention: q, k and v are this rank's heads."""
        parts = self._parted[node.inputs[0].name]
        if node.op == "paged_attention":
            self._cut(node, "pre_scale", 0, parts)
            self._cut(node, "sinks", 0, (node.attrs["num_heads"],))
        for name in {"num_heads", "num_kv_heads"} & set(node.attrs):
            node.attrs[name] = self.share(node.attrs[name], node.name)
        self._parted[node.outputs[0].name] = parts

    def _columnwise(self, node: Node) -> None:
        """swiglu, quantize and gather_rows: each column by itself."""
        parts = self._parted.get(node.inputs[0].name)
        if parts is None:
            self._whole(node)
            return
        if node.op != "gather_rows":
            self._cut(node, "pre_scale", 0, parts)
        if node.attrs.get("scales", 0) > 1:
            node.attrs["scales"] = self.share(node.attrs["scales"], node.name)
        self._parted[node.outputs[0].name] = parts

    def _split(self, node: Node) -> None:
        source = node.inputs[0]
        if source.name not in self._parted:
            return
        sizes = self._sizes(node)
        shared = [self.share(size, node.name) for size in sizes]
        node.inputs[1] = self._rewriter.constant(
            f"{node.inputs[1].name}.shard", np.array(shared, np.int64), "i64"
        )
        for tensor, whole, size in zip(node.outputs, sizes, shared, strict=True):
            tensor.shape = [source.shape[0], size]
            self._parted[tensor.name] = (whole,)

    def _sizes(self, split: Node) -> Parts:
        values = self._rewriter.value(split.inputs[1])
        assert values is not None, f"{split.name} has no sizes"
        return tuple(int(size) for size in values)

    def _cut(self, node: Node, parameter: str, axis: int, parts: Parts) -> None:
        """Leave this rank's pieces of a weight; `parts` are channels, of which a scale may have one
        for a group of them, or one for all."""
        tensor = input_of(node, parameter)
        if tensor is None or (tensor.shape[axis] == 1 and sum(parts) > 1):
            return
        group = sum(parts) // tensor.shape[axis]
        where = f"{node.name}.{parameter}"
        shape = list(tensor.shape)
        shape[axis] = sum(self.share(part, where, group) for part in parts) // group
        recipe = Shard(
            self._rewriter.recipes[tensor.name],
            axis,
            tuple(part // group for part in parts),
            self._ranks,
        )
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


_RULES: Mapping[str, Callable[[_Walk, Node], None]] = {
    "linear": _Walk._linear,
    "moe": _Walk._moe,
    "rope": _Walk._heads,
    "rope_kv_write": _Walk._heads,
    "paged_attention": _Walk._heads,
    "swiglu": _Walk._columnwise,
    "quantize": _Walk._columnwise,
    "gather_rows": _Walk._columnwise,
}
