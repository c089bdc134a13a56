"""bf16 weights in 12 bits each, for the CPU kernels."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, dtype_of, input_of
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.transforms import CompactScales, PackCompact
from trtc.plugins.compact import compact_bytes
from trtc.plugins.layouts import WEIGHTS


def compact_weights(rewriter: Rewriter) -> bool:
    """Pack every bf16 weight in layout compact; see plugins/compact.py.

    Rules, for bf16 x:
        linear(x, weight [N, K] bf16; row_major) -> linear(x, u8 [bytes], s [N, 1]; compact)
        moe(x, _, gate_up [E, 2I, H] bf16, down [E, H, I] bf16; row_major) -> the same of both
    Embedding tables stay as they are, those too that are the lm_head as well.

    Weights below 2^-13 of their row's largest are rounded, by 2^-14 of it at most.
    """
    changed = False
    for op, names in WEIGHTS.items():
        for node in rewriter.fused_nodes(op):
            is_bf16 = node.attrs["weight_dtype"] == dtype_of(node.inputs[0]) == "bf16"
            if is_bf16 and node.attrs["layout"] == "row_major":
                for name in names:
                    _compact(rewriter, node, name)
                node.attrs["layout"] = "compact"
                changed = True
    return changed


def _compact(rewriter: Rewriter, node: Node, name: str) -> None:
    weight = input_of(node, name)
    assert weight is not None, f"{node.name} has no {name}"
    *experts, num_columns, depth = weight.shape
    size = compact_bytes(num_columns, depth) * (experts[0] if experts else 1)
    scales = rewriter.derived(
        f"{weight.name}.scale", CompactScales(), (weight,), "f32", (*experts, num_columns, 1)
    )
    packed = rewriter.derived(f"{weight.name}.compact", PackCompact(), (weight,), "u8", (size,))
    rewriter.set_input(node, f"{name}_scale", scales)
    rewriter.set_input(node, name, packed)


COMPACT_WEIGHTS = Rewrite("compact_weights", compact_weights, requires=frozenset({"merge_linears"}))
