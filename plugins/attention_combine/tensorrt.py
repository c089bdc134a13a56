"""trtc::attention_combine as an ahead-of-time TensorRT plugin."""

from typing import Any

from trtc.plugins.attention_combine.op import ATTENTION_COMBINE
from trtc.plugins.tensorrt.aot import Kernels, Node, Plugin, register_plugin
from trtc.protos.bundle import KernelFacts


def register(trtp: Any, kernels: Kernels, *, lazy: bool = False) -> None:
    """Make the plugin known to TensorRT: see register_plugin."""

    def launch(node: Node, kernel: KernelFacts) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        programs = -(-node.attributes["num_heads"] // kernel.rows)
        sequences = node.tensors["context_lens"].shape_expr[0]
        return (node.tensors["rows"].shape_expr[0], programs), (sequences,)

    plugin = Plugin(
        op=ATTENTION_COMBINE,
        inputs=ATTENTION_COMBINE.inputs,
        key=("rows",),
        same_type={"out": "rows"},
        describe=lambda node: node.tensors["rows"].like(),
        launch=launch,
    )
    register_plugin(trtp, kernels, plugin, lazy=lazy)
