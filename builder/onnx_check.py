"""Checks modules with onnx.checker, their external initialisers as graph inputs."""

import onnx

from trtc.builder.graph_writer import value_info
from trtc.builder.module import Module


def check_module(module: Module) -> None:
    """Run onnx.checker on the graph; nodes of trtc's domain are not checked.

    The checker wants to open external files, which a module does not have: its external
    initialisers are shown to it as inputs.

    Raises:
        onnx.checker.ValidationError: the graph is not valid ONNX.
    """
    onnx.checker.check_model(with_weights_as_inputs(module.model))


def with_weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose external initialisers are graph inputs of the same name, type and shape."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    initializers = model.graph.initializer
    del shown.graph.initializer[:]
    shown.graph.initializer.extend(one for one in initializers if not is_external(one))
    shown.graph.input.extend(
        value_info(one.name, one.data_type, tuple(one.dims))
        for one in initializers
        if is_external(one)
    )
    return shown


def is_external(initializer: onnx.TensorProto) -> bool:
    return bool(initializer.data_location == onnx.TensorProto.EXTERNAL)
