"""Merges scales of input channels that hold the same values into one weight."""

from functools import partial

import numpy as np

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import Node, Tensor, is_weight
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.recipes import TensorReader


def share_pre_scales(reader: TensorReader) -> Rewrite:
    """A pass that compares pre-scales by their values, which only the checkpoint knows.

    Rule: Mul(x, p[K]), Mul(x, p'[K]) -> Mul(x, p), Mul(x, p), where p and p' hold the same bytes.

    Checkpoints store one pre_quant_scale a linear. SmoothQuant gives q, k and v the same one, and
    only when that shows can later passes quantise their input once and merge them. The vectors
    are read, at K values each; nothing else is.
    """
    return Rewrite("share_pre_scales", partial(_share, reader))


def _share(reader: TensorReader, rewriter: Rewriter) -> bool:
    changed = False
    kept: dict[str, list[Tensor]] = {}
    for multiply in rewriter.nodes("Mul"):
        scale = _pre_scale(multiply)
        if scale is None:
            continue
        others = kept.setdefault(multiply.inputs[0].name, [])
        twin = next((other for other in others if _equal(rewriter, reader, scale, other)), None)
        if twin is None:
            others.append(scale)
        elif twin is not scale:
            multiply.inputs[1] = twin
            changed = True
    return changed


def _pre_scale(multiply: Node) -> Tensor | None:
    scale = multiply.inputs[1]
    return scale if is_weight(scale) and len(scale.shape) == 1 else None


def _equal(rewriter: Rewriter, reader: TensorReader, left: Tensor, right: Tensor) -> bool:
    if rewriter.same_weight(left, right):
        return True
    values, others = (rewriter.recipes[tensor.name].load(reader) for tensor in (left, right))
    return bool(np.array_equal(values, others))
