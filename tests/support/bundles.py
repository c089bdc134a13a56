"""TensorRT bundles for tests, and their graphs as the reference evaluator runs them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.builder.recipes import Array
from trtc.builder.targets.tensorrt import PLUGIN_ATTRIBUTES
from trtc.protos.bundle import read_recipe
from trtc.protos.manifest import GRAPH_FILE, read_manifest


class NoReader:
    """For modules whose weights are all constants."""

    def read(self, name: str) -> Array:
        raise AssertionError(f"{name} is not in the bundle")


def bundle_module(bundle: Path) -> Module:
    """The very file, its weights out of weights.safetensors, without TensorRT's attributes."""
    model = onnx.load(bundle / GRAPH_FILE, load_external_data=True)
    for node in model.graph.node:
        if node.domain == TRTC_DOMAIN:
            kept = [one for one in node.attribute if one.name not in PLUGIN_ATTRIBUTES]
            assert len(kept) == len(node.attribute) - len(PLUGIN_ATTRIBUTES)
            del node.attribute[:]
            node.attribute.extend(kept)
    return Module(model, {}, read_recipe(bundle).pool, read_manifest(bundle).limits)


def without_plugins(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with its plugin nodes cut out: their outputs become graph inputs, their inputs
    graph outputs."""
    graph = model.graph
    infos = {info.name: info for info in [*graph.input, *graph.value_info, *graph.output]}
    cut = [node for node in graph.node if node.domain == TRTC_DOMAIN]
    kept = [node for node in graph.node if node.domain != TRTC_DOMAIN]
    made = {name for node in kept for name in node.output}
    read = {name for node in kept for name in node.input}
    inputs = [info for info in graph.input if info.name in read]
    inputs += [infos[name] for node in cut for name in node.output if name in read]
    outputs = [info for info in graph.output if info.name in made]
    fed = dict.fromkeys(name for node in cut for name in node.input if name in made)
    outputs += [infos[name] for name in fed]
    return onnx.helper.make_model(
        onnx.helper.make_graph(
            kept,
            graph.name,
            inputs,
            outputs,
            initializer=[tensor for tensor in graph.initializer if tensor.name in read],
        ),
        opset_imports=[one for one in model.opset_import if not one.domain],
        ir_version=model.ir_version,
    )


def dims(info: onnx.ValueInfoProto) -> list[int | str]:
    """Extents, or the names of those that vary."""
    return [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]


def distance(found: Any, expected: Any) -> float:
    """Root mean square of the difference, as a share of that of `expected`."""
    assert np.isfinite(expected).all()
    difference = np.asarray(found, np.float64) - np.asarray(expected, np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))
