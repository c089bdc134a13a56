"""Checks modules with onnx.checker, their external initialisers as graph inputs."""

import onnx

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


def _with_graph(model: onnx.ModelProto, graph: onnx.GraphProto) -> onnx.ModelProto:
    return onnx.helper.make_model(
        graph,
        opset_imports=list(model.opset_import),
        ir_version=model.ir_version,
        producer_name=model.producer_name,
    )
