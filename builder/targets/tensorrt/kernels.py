"""The kernels that a graph's plugin nodes need, each specialisation compiled once."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.builder.targets.gpu.ptx import CompiledKernel
from trtc.builder.targets.gpu.triton import compile_kernels
from trtc.builder.targets.tensorrt.cut import tensor_types
from trtc.plugins.gpu.sources import KernelSource
from trtc.plugins.registry import REGISTRY
from trtc.protos.bundle import KERNELS_DIR, KernelFacts
from trtc.protos.dtypes import BY_ONNX

Attributes = dict[str, int | float | str]


@dataclass(frozen=True)
class _Specialisation:
    op: str
    dtypes: dict[str, str]
    attributes: Attributes
    page_size: int

    @property
    def key(self) -> str:
        text = json.dumps([self.op, self.dtypes, self.attributes, self.page_size], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_kernels(
    module: Module, sm: int, engine: Path, folder: str = KERNELS_DIR
) -> tuple[KernelFacts, ...]:
    """Compile what `module` needs for one SM into `engine`/`folder`.

    Raises:
        UnsupportedError: an E4M3 pool on an SM without E4M3.
    """
    (engine / folder).mkdir(parents=True)
    wanted = {one.key: one for _, one in _specialisations(module)}
    launched = [(one, *tactic) for one in wanted.values() for tactic in _tactics(one)]
    kernels = compile_kernels([source for *_, source in launched], sm)
    return tuple(
        _write(one, tactic, rows, kernel, engine, f"{folder}/{one.op}-{one.key}-{tactic}")
        for (one, tactic, rows, _), kernel in zip(launched, kernels, strict=True)
    )


def kernels_of_nodes(
    module: Module, kernels: Sequence[KernelFacts]
) -> Mapping[str, tuple[int, ...]]:
    """Plugin node -> its kernels among those that `write_kernels` gave, by tactic."""
    return {
        node: tuple(
            index
            for index, kernel in enumerate(kernels)
            if (kernel.op, kernel.dtypes, kernel.attributes) == (one.op, one.dtypes, one.attributes)
        )
        for node, one in _specialisations(module)
    }


def _specialisations(module: Module) -> Iterator[tuple[str, _Specialisation]]:
    """Every plugin node's name and what it needs."""
    graph = module.model.graph
    types = {
        name: BY_ONNX.get(info.type.tensor_type.elem_type)
        for name, info in tensor_types(graph).items()
    }
    for node in graph.node:
        if node.domain != TRTC_DOMAIN:
            continue
        definition = REGISTRY[node.op_type]
        inputs = dict(zip((p.name for p in definition.inputs), node.input, strict=False))
        dtypes: dict[str, str] = {}
        for name in ("q", "k", "rows", "pool"):
            if name in inputs:
                dtype = types[inputs[name]]
                assert dtype is not None, f"{node.name}: the type of {name} is not stated"
                dtypes[name] = dtype.name
        yield (
            node.name,
            _Specialisation(
                op=node.op_type,
                dtypes=dtypes,
                attributes=definition.complete_attributes(_attributes(node)),
                page_size=module.kv.page_size,
            ),
        )


def _tactics(one: _Specialisation) -> list[tuple[int, int, KernelSource]]:
    """(tactic, rows of a block, source)."""
    from trtc.plugins.attention.tensorrt_tiles import TACTICS, block_q
    from trtc.plugins.attention_combine import tensorrt_kernel as attention_combine
    from trtc.plugins.attention_split import tensorrt_kernel as attention_split
    from trtc.plugins.kv_write import tensorrt_kernel as kv_write
    from trtc.plugins.paged_attention import tensorrt_kernel as paged_attention

    if one.op == "kv_write":
        return [(1, 1, kv_write.kernel(one.dtypes, one.attributes, one.page_size))]
    kernel, rows = {
        "paged_attention": (paged_attention.kernel, block_q),
        "attention_split": (attention_split.kernel, block_q),
        "attention_combine": (attention_combine.kernel, attention_combine.heads),
    }[one.op]
    sources = [
        (tactic, kernel(one.dtypes, one.attributes, one.page_size, tactic)) for tactic in TACTICS
    ]
    return [(tactic, rows(source), source) for tactic, source in sources]


def _write(
    one: _Specialisation,
    tactic: int,
    rows: int,
    kernel: CompiledKernel,
    engine: Path,
    stem: str,
) -> KernelFacts:
    (engine / f"{stem}.ptx").write_bytes(kernel.ptx)
    (engine / f"{stem}.cubin").write_bytes(kernel.cubin)
    return KernelFacts(
        op=one.op,
        dtypes=one.dtypes,
        attributes=one.attributes,
        tactic=tactic,
        entry=kernel.entry,
        parameters=tuple(parameter.name for parameter in kernel.parameters),
        num_threads=kernel.num_threads,
        shared_bytes=kernel.shared_bytes,
        rows=rows,
        ptx_target=kernel.ptx_target,
        ptx_version=kernel.ptx_version,
        ptx=f"{stem}.ptx",
        cubin=f"{stem}.cubin",
    )


def _attributes(node: onnx.NodeProto) -> Attributes:
    values: Attributes = {}
    for attribute in node.attribute:
        value: Any = onnx.helper.get_attribute_value(attribute)
        values[attribute.name] = value.decode() if isinstance(value, bytes) else value
    return values
