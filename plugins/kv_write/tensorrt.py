"""trtc::kv_write as an ahead-of-time TensorRT plugin."""

from typing import Any

from trtc.plugins.kv_write.op import KV_WRITE
from trtc.plugins.tensorrt.aot import Kernels, Node, Plugin, register_plugin
from trtc.protos.bundle import KernelFacts


def register(trtp: Any, kernels: Kernels, *, alias_pools: bool, lazy: bool = False) -> None:
    """Make the plugin known to TensorRT: see register_plugin.

    Args:
        alias_pools: declare that the output is the input's memory.
    """

    def describe(node: Node) -> Any:
        pool = node.tensors["pool"]
        return pool.aliased() if alias_pools else pool.like()

    def launch(node: Node, kernel: KernelFacts) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        return (node.tensors["slots"].shape_expr[0], 1), ()

    plugin = Plugin(
        op=KV_WRITE,
        inputs=KV_WRITE.inputs,
        key=("k", "pool"),
        same_type={"v": "k", "pool_out": "pool"},
        describe=describe,
        launch=launch,
    )
    register_plugin(trtp, kernels, plugin, lazy=lazy)
