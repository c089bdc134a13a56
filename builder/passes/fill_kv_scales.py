"""Plugins of TensorRT have a fixed number of inputs: absent KV scales become ones."""

import numpy as np

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import input_of
from trtc.builder.passes.rewriter import Rewriter


def fill_kv_scales(rewriter: Rewriter) -> bool:
    """Give every kv_write and paged_attention node a k_scale and a v_scale; 1 changes no bit."""
    changed = False
    for op in ("kv_write", "paged_attention"):
        for node in rewriter.fused_nodes(op):
            for name in ("k_scale", "v_scale"):
                if input_of(node, name) is None:
                    one = rewriter.constant("kv_scale.one", np.ones((), np.float32), "f32")
                    rewriter.set_input(node, name, one)
                    changed = True
    return changed


FILL_KV_SCALES = Rewrite("fill_kv_scales", fill_kv_scales)
