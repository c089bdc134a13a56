"""Dynamic int8 activations for integer weights in groups: the CPU target's choice of speed."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import dtype_of, has_powers
from trtc.builder.passes.rewriter import Rewriter


def select_cpu_activation(rewriter: Rewriter) -> bool:
    """Multiply integer weights with int8 activations, scaled by row and group of input channels.

    Rules, for i6, i4, u4 and iq4 weights, i8 ones in groups, and f4e2m1 ones but of experts with
    E8M0 scales, whose activations are bf16 and not quantised already:
        linear -> linear; activation=dynamic_i8
        moe    -> moe; act_quant=dynamic_i8

    This rounds activations more than the source graph does; the accuracy report counts it, and
    exact activations leave this pass out.
    """
    changed = False
    for op, attribute in (("linear", "activation"), ("moe", "act_quant")):
        for node in rewriter.fused_nodes(op):
            dtype = node.attrs["weight_dtype"]
            is_narrow = (
                dtype in ("i6", "i4", "u4", "iq4")
                or (dtype == "i8" and node.attrs["group_size"] > 0)
                or (dtype == "f4e2m1" and (op == "linear" or not has_powers(node)))
            )
            is_exact = node.attrs[attribute] in ("exact", "none")
            if is_narrow and is_exact and dtype_of(node.inputs[0]) == "bf16":
                node.attrs[attribute] = "dynamic_i8"
                changed = True
    return changed


SELECT_CPU_ACTIVATION = Rewrite(
    "select_cpu_activation", select_cpu_activation, requires=frozenset({"lower_linears"})
)
