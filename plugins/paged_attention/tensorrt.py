"""trtc::paged_attention as an ahead-of-time TensorRT plugin."""

from typing import Any

from trtc.plugins.paged_attention.op import PAGED_ATTENTION
from trtc.plugins.tensorrt.aot import Kernels, Node, Plugin, register_plugin
from trtc.protos.bundle import KernelFacts

_LEFT_OUT = ("pre_scale", "out_scale", "sinks")
"""TensorRT quantises the result of attention in separate nodes. Models with sinks are refused."""


def register(trtp: Any, kernels: Kernels, *, lazy: bool = False) -> None:
    """Make the plugin known to TensorRT: see register_plugin."""

    def launch(node: Node, kernel: KernelFacts) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        tensors = node.tensors
        sequences = tensors["context_lens"].shape_expr[0]
        tiles = trtp.cdiv(tensors["q"].shape_expr[0], kernel.rows) + sequences
        width = tensors["page_table"].shape_expr[1]
        return (tiles, node.attributes["num_kv_heads"]), (sequences, width)

    plugin = Plugin(
        op=PAGED_ATTENTION,
        inputs=tuple(one for one in PAGED_ATTENTION.inputs if one.name not in _LEFT_OUT),
        key=("q", "pool"),
        same_type={"out": "q"},
        describe=lambda node: node.tensors["q"].like(),
        launch=launch,
    )
    register_plugin(trtp, kernels, plugin, lazy=lazy)
