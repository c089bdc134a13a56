"""trtc::attention_split as an ahead-of-time TensorRT plugin: partial sums are further outputs."""

from typing import Any

from trtc.plugins.attention.split_kv import TENSORRT
from trtc.plugins.attention_split.op import ATTENTION_SPLIT
from trtc.plugins.tensorrt.aot import Kernels, Node, Plugin, register_plugin
from trtc.protos.bundle import KernelFacts


def register(trtp: Any, kernels: Kernels, *, lazy: bool = False) -> None:
    """Make the plugin known to TensorRT: see register_plugin."""

    def describe(node: Node) -> Any:
        a, scale = node.attributes, node.tensors["k_scale"]
        sequences = node.tensors["context_lens"].shape_expr[0]
        rows = a["splits"] * a["num_heads"]
        partial = trtp.from_shape_expr((sequences, rows * a["head_dim"]), scale.dtype)
        stats = trtp.from_shape_expr((sequences, rows * 2), scale.dtype)
        return node.tensors["q"].like(), partial, stats

    def launch(node: Node, kernel: KernelFacts) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        tensors, a = node.tensors, node.attributes
        sequences = tensors["context_lens"].shape_expr[0]
        width = tensors["page_table"].shape_expr[1]
        tiles = trtp.cdiv(tensors["q"].shape_expr[0], kernel.rows) + sequences
        # A step whose page table is narrow has no long context: fewer programs have nothing to do.
        most_keys = width * tensors["pool"].shape_expr[2]
        most = trtp.min(a["splits"], trtp.cdiv(most_keys, TENSORRT.keys))
        return (tiles, most * a["num_kv_heads"]), (sequences, width)

    plugin = Plugin(
        op=ATTENTION_SPLIT,
        inputs=ATTENTION_SPLIT.inputs,
        key=("q", "pool"),
        same_type={"out": "q"},
        describe=describe,
        launch=launch,
    )
    register_plugin(trtp, kernels, plugin, lazy=lazy)
