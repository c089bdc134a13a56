"""The order of an activation's channels as trtc.gather_columns."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import is_weight
from trtc.builder.passes.rewriter import Rewriter


def lower_gather_columns(rewriter: Rewriter) -> bool:
    """Lower reorderings of columns.

    Rule: Gather(x, order; axis=1) -> gather_columns(x, order), for computed x [M, K] and an
    initialiser order [K].
    """
    changed = False
    for gather in rewriter.nodes("Gather"):
        x, order = gather.inputs
        if is_weight(x) or not is_weight(order) or len(x.shape) != 2:
            continue
        if gather.attrs.get("axis", 0) != 1 or list(order.shape) != [x.shape[1]]:
            continue
        rewriter.fused(
            "gather_columns",
            gather.name,
            inputs={"x": x, "columns": order},
            outputs={"out": gather.outputs[0]},
            attributes={},
        )
        changed = True
    return changed


LOWER_GATHER_COLUMNS = Rewrite("lower_gather_columns", lower_gather_columns)
