"""A graph without its plugin nodes: the segments between them, each a graph of its own.

A node's depth is the number of attention layers before it. Segment d holds the nodes of depth d,
gap d the plugin nodes that read them, so that segments and gaps alternate. Weights' arithmetic
(DequantizeLinear, Transpose) and integer arithmetic on the step's inputs (positions for rope)
belong to no depth: every segment that wants them has its own copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from trtc.builder.module import TRTC_DOMAIN

ATTENTION_RESULTS = ("paged_attention", "attention_combine")
"""Plugins whose output ends a layer's gap."""
_INTEGERS = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)


@dataclass(frozen=True)
class Subgraph:
    """A segment, and the plugin nodes that follow it."""

    model: onnx.ModelProto
    gap: tuple[onnx.NodeProto, ...]
    """In order; empty after the last segment."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(info.name for info in self.model.graph.input)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(info.name for info in self.model.graph.output)


def cut(model: onnx.ModelProto) -> tuple[Subgraph, ...]:
    """Cut `model` at every node of trtc's domain; the subgraphs in the order in which they run.

    External weights stay where they are: a segment's file belongs beside that of the model.
    """
    return _Cut(model).subgraphs()


def tensor_types(graph: onnx.GraphProto) -> Mapping[str, onnx.ValueInfoProto]:
    """Every tensor whose type the graph states."""
    return {info.name: info for info in [*graph.input, *graph.value_info, *graph.output]}


class _Cut:
    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._infos = tensor_types(model.graph)
        self._constant = {tensor.name for tensor in model.graph.initializer}
        """Weights and what depends on them alone."""
        self._makers = {name: node for node in model.graph.node for name in node.output}
        self._copied: set[str] = set()
        """Tensors that every segment makes for itself."""
        self._depths: dict[str, int] = {}
        self._segments: dict[int, list[onnx.NodeProto]] = {}
        self._gaps: dict[int, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            self._place(node)

    def subgraphs(self) -> tuple[Subgraph, ...]:
        whole = {depth: self._with_copies(nodes) for depth, nodes in self._segments.items()}
        readers = [*whole.values(), *self._gaps.values()]
        final = {info.name for info in self._model.graph.output}
        return tuple(
            Subgraph(
                model=self._segment(
                    nodes, final.union(*(_read(other) for other in readers if other is not nodes))
                ),
                gap=tuple(self._gaps.get(depth, ())),
            )
            for depth, nodes in sorted(whole.items())
        )

    def _place(self, node: onnx.NodeProto) -> None:
        if self._is_copied(node):
            self._copied.update(node.output)
            return
        depth = max((self._depths.get(name, 0) for name in node.input), default=0)
        if node.domain != TRTC_DOMAIN:
            self._segments.setdefault(depth, []).append(node)
        else:
            self._gaps.setdefault(depth, []).append(node)
            depth += node.op_type in ATTENTION_RESULTS
        self._depths.update(dict.fromkeys(node.output, depth))

    def _is_copied(self, node: onnx.NodeProto) -> bool:
        """Whether a node depends on weights alone, or is integer arithmetic on step inputs."""
        if node.domain == TRTC_DOMAIN:
            return False
        if self._constant.issuperset(filter(None, node.input)):
            self._constant.update(node.output)
            return True
        made = [name for name in node.input if name in self._makers]
        integers = all(self._element(name) in _INTEGERS for name in node.output)
        return integers and self._copied.issuperset(made)

    def _element(self, name: str) -> int:
        return int(self._infos[name].type.tensor_type.elem_type)

    def _with_copies(self, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """The nodes, and before each the copied arithmetic that it reads."""
        result: list[onnx.NodeProto] = []
        known: set[str] = set()

        def add(node: onnx.NodeProto) -> None:
            for name in node.input:
                if name in self._copied and name not in known:
                    add(self._makers[name])
            result.append(node)
            known.update(node.output)

        for node in nodes:
            add(node)
        return result

    def _segment(self, nodes: list[onnx.NodeProto], wanted: set[str]) -> onnx.ModelProto:
        """One segment as a model: it gives what is `wanted` elsewhere."""
        made = {name for node in nodes for name in node.output}
        read = _read(nodes)
        inputs = [name for name in self._infos if name in read - made]
        outputs = [name for node in nodes for name in node.output if name in wanted - self._copied]
        graph = onnx.helper.make_graph(
            nodes,
            self._model.graph.name,
            [self._infos[name] for name in inputs],
            [self._infos[name] for name in outputs],
            initializer=[one for one in self._model.graph.initializer if one.name in read],
            value_info=[info for name, info in self._infos.items() if name in made - set(outputs)],
        )
        return onnx.helper.make_model(
            graph,
            opset_imports=[one for one in self._model.opset_import if one.domain != TRTC_DOMAIN],
            ir_version=self._model.ir_version,
            producer_name=self._model.producer_name,
        )


def _read(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    return {name for node in nodes for name in node.input if name}
