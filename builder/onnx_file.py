"""A module as an .onnx file with its weights beside it, for Netron, onnx.checker and people."""

from pathlib import Path

import numpy as np
import onnx

from trtc.builder.module import Module
from trtc.builder.recipes import Array, TensorReader

_ALIGNMENT = 4096
"""Readers of external data map it by pages."""
_FOUR_BIT = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)


def check_module(module: Module) -> None:
    """Run onnx.checker on the graph; trtc's own operators are taken on trust.

    The checker wants to open external files, which a module does not have: its external
    initialisers are shown to it as inputs.

    Raises:
        onnx.checker.ValidationError: the graph is not valid ONNX.
    """
    onnx.checker.check_model(with_weights_as_inputs(module.model))


def with_weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose external initialisers are graph inputs of the same name, type and shape."""
    graph = model.graph
    inputs = list(graph.input)
    inline: list[onnx.TensorProto] = []
    for initializer in graph.initializer:
        if is_external(initializer):
            inputs.append(
                onnx.helper.make_tensor_value_info(
                    initializer.name, initializer.data_type, initializer.dims
                )
            )
        else:
            inline.append(initializer)
    return _with_graph(
        model,
        onnx.helper.make_graph(
            graph.node,
            graph.name,
            inputs,
            graph.output,
            initializer=inline,
            value_info=graph.value_info,
        ),
    )


def is_external(initializer: onnx.TensorProto) -> bool:
    return bool(initializer.data_location == onnx.TensorProto.EXTERNAL)


def write_onnx(module: Module, path: Path, reader: TensorReader) -> None:
    """Write `path` and `<path>.data`, one weight at a time.

    Raises:
        OSError: the directory cannot be written.
    """
    data_path = path.with_name(path.name + ".data")
    model = onnx.ModelProto()
    model.CopyFrom(module.model)
    with data_path.open("wb") as data:
        for initializer in model.graph.initializer:
            if not is_external(initializer):
                continue
            data.write(b"\0" * (-data.tell() % _ALIGNMENT))
            offset = data.tell()
            values = module.recipes[initializer.name].load(reader)
            data.write(_raw_bytes(values, initializer.data_type))
            del initializer.external_data[:]
            for key, value in (
                ("location", data_path.name),
                ("offset", str(offset)),
                ("length", str(data.tell() - offset)),
            ):
                initializer.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _raw_bytes(values: Array, data_type: int) -> bytes:
    """ONNX's raw_data: little endian; two 4-bit elements a byte, the first one low."""
    if data_type not in _FOUR_BIT:
        return np.ascontiguousarray(values).tobytes()
    nibbles = values.ravel().astype(np.int8).view(np.uint8) & 0xF
    nibbles = np.append(nibbles, np.zeros(nibbles.size % 2, dtype=np.uint8))
    packed: Array = nibbles[0::2] | nibbles[1::2] << 4
    return packed.tobytes()


def _with_graph(model: onnx.ModelProto, graph: onnx.GraphProto) -> onnx.ModelProto:
    return onnx.helper.make_model(
        graph,
        opset_imports=list(model.opset_import),
        ir_version=model.ir_version,
        producer_name=model.producer_name,
    )
