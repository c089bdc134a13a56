"""The choice of rows that need logits as trtc.gather_rows."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import is_weight
from trtc.builder.passes.rewriter import Rewriter


def lower_gather_rows(rewriter: Rewriter) -> bool:
    """Lower row selection.

    Rule: Gather(x, rows; axis=0) -> gather_rows(x, rows), for computed x [M, K] and rows [R].
    """
    changed = False
    for gather in rewriter.nodes("Gather"):
        x, rows = gather.inputs
        if is_weight(x) or len(x.shape) != 2 or len(rows.shape) != 1:
            continue
        if gather.attrs.get("axis", 0) != 0:
            continue
        rewriter.fused(
            "gather_rows",
            gather.name,
            inputs={"x": x, "rows": rows},
            outputs={"out": gather.outputs[0]},
            attributes={},
        )
        changed = True
    return changed


LOWER_GATHER_ROWS = Rewrite("lower_gather_rows", lower_gather_rows)
