"""Routed experts with weights as the kernels read them."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.rewriter import Rewriter, dtype_of, input_of

_TYPES = {
    "gate_up_zero": "u8",
    "down_zero": "u8",
    "gate_up_pre_scale": "f32",
    "down_pre_scale": "f32",
}


def lower_moe(rewriter: Rewriter) -> bool:
    """Give trtc.moe its weights in the kernels' types.

    Rule: zero points become u8, one a byte, and pre_scales f32; both exactly.
    """
    changed = False
    for node in rewriter.fused_nodes("moe"):
        for name, dtype in _TYPES.items():
            tensor = input_of(node, name)
            if tensor is not None and dtype_of(tensor) != dtype:
                rewriter.set_input(node, name, rewriter.as_type(tensor, dtype))
                changed = True
    return changed


LOWER_MOE = Rewrite("lower_moe", lower_moe)
