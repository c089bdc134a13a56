"""stages.json, the stages of a step of an engine of plans, from a graph, whole or cut."""

import re
from collections.abc import Mapping, Sequence

import onnx

from trtc.builder.memory import Life, place
from trtc.builder.module import Module
from trtc.builder.targets.tensorrt.cut import Subgraph, tensor_types
from trtc.builder.targets.tensorrt.kernels import kernels_of_nodes
from trtc.plugins.registry import REGISTRY
from trtc.protos.bundle import PLAN_BLOB_FILE, KernelFacts, Profile
from trtc.protos.dtypes import BY_ONNX
from trtc.protos.errors import InvariantError
from trtc.protos.plan import Buffer, buffer_bytes
from trtc.protos.stages import TENSOR_ALIGNMENT, Launch, Segment, Stages

_POOL = re.compile(r"kv_\d+(_out)?")
_ROWS = ("T", "R", "B")


def whole_stages(module: Module, profiles: tuple[Profile, ...]) -> Stages:
    """One plan of the whole graph, its plugins inside."""
    graph = module.model.graph
    segment = Segment(
        plan=PLAN_BLOB_FILE,
        inputs=tuple(info.name for info in graph.input),
        outputs=tuple(info.name for info in graph.output),
    )
    return Stages(
        pool=module.kv,
        profiles=profiles,
        buffers=(),
        arena_bytes=0,
        constants={},
        stages=(segment,),
        kernels={},
    )


def cut_stages(
    module: Module,
    subgraphs: Sequence[Subgraph],
    plans: Sequence[str],
    profiles: tuple[Profile, ...],
    kernels: Mapping[str, tuple[KernelFacts, ...]],
) -> Stages:
    """Plans of the subgraphs of a graph, and its plugins' kernels between them.

    Args:
        plans: the file of each subgraph.
        kernels: by SM; the same ones in the same order for each.
    """
    by_node = kernels_of_nodes(module, next(iter(kernels.values())))
    stages: list[Segment | Launch] = []
    for subgraph, plan in zip(subgraphs, plans, strict=True):
        stages.append(Segment(plan=plan, inputs=subgraph.inputs, outputs=subgraph.outputs))
        stages += [_launch(node, by_node[node.name], len(profiles)) for node in subgraph.gap]
    buffers, arena = _place_buffers(module, stages)
    return Stages(
        pool=module.kv,
        profiles=profiles,
        buffers=buffers,
        arena_bytes=arena,
        constants=_constants(module, stages),
        stages=tuple(stages),
        kernels=dict(kernels),
    )


def _launch(node: onnx.NodeProto, tactics: tuple[int, ...], num_profiles: int) -> Launch:
    """Tactics are for few and for many rows, in the order of the profiles."""
    definition = REGISTRY[node.op_type]
    inputs = zip((p.name for p in definition.inputs), node.input, strict=False)
    outputs = zip((p.name for p in definition.outputs), node.output, strict=True)
    return Launch(
        site=node.name,
        op=node.op_type,
        arguments={name: tensor for name, tensor in [*inputs, *outputs] if tensor},
        kernels=tuple(tactics[min(p, len(tactics) - 1)] for p in range(num_profiles)),
    )


def _tensors(stage: Segment | Launch) -> tuple[str, ...]:
    if isinstance(stage, Segment):
        return (*stage.inputs, *stage.outputs)
    return tuple(stage.arguments.values())


def _place_buffers(
    module: Module, stages: Sequence[Segment | Launch]
) -> tuple[tuple[Buffer, ...], int]:
    """Every tensor that goes from one stage to another, over one arena."""
    graph = module.model.graph
    inputs = {info.name for info in graph.input}
    weights = {tensor.name for tensor in graph.initializer}
    lives: dict[str, tuple[int, int]] = {}
    for number, stage in enumerate(stages):
        for name in _tensors(stage):
            if name in inputs | weights or name == "logits" or _POOL.fullmatch(name):
                continue
            first, _ = lives.get(name, (number, number))
            lives[name] = (first, number)
    types = tensor_types(graph)
    buffers = [_buffer(types[name]) for name in lives]
    sizes = [_aligned(buffer_bytes(buffer, module.limits)) for buffer in buffers]
    offsets, arena = place(
        [Life(size, *life) for size, life in zip(sizes, lives.values(), strict=True)]
    )
    assert not any(offset % TENSOR_ALIGNMENT for offset in offsets)
    placed = tuple(
        Buffer(name=b.name, dtype=b.dtype, rows=b.rows, columns=b.columns, offset=offset)
        for b, offset in zip(buffers, offsets, strict=True)
    )
    return placed, arena


def _buffer(info: onnx.ValueInfoProto) -> Buffer:
    tensor = info.type.tensor_type
    rows, *columns = tensor.shape.dim
    if len(columns) != 1 or rows.dim_param not in _ROWS or not columns[0].dim_value:
        raise InvariantError("goes from one segment to another and is no matrix", field=info.name)
    return Buffer(
        name=info.name,
        dtype=BY_ONNX[tensor.elem_type].name,
        rows=rows.dim_param,
        columns=columns[0].dim_value,
        offset=0,
    )


def _aligned(size: int) -> int:
    return -(-size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


def _constants(module: Module, stages: Sequence[Segment | Launch]) -> dict[str, float]:
    """Scalars among the launches' arguments: they are small enough to be inline."""
    inline = {tensor.name: tensor for tensor in module.model.graph.initializer}
    names = {
        name
        for stage in stages
        if isinstance(stage, Launch)
        for name in stage.arguments.values()
        if name in inline
    }
    return {
        name: float(onnx.numpy_helper.to_array(inline[name]).reshape(())) for name in sorted(names)
    }
