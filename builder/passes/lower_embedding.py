"""The embedding lookup as trtc.embedding."""

from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.matching import dtype_of, is_weight, site_of
from trtc.builder.passes.rewriter import Rewriter


def lower_embedding(rewriter: Rewriter) -> bool:
    """Lower lookups in a table.

    Rules:
        Gather(table, ids)            -> embedding(ids, table)
        Mul(Gather(table, ids), c)    -> embedding(ids, table; scale=c), for a scalar c
    for a table of rows; a vector has one number for each id, as scales of positions do.
    """
    changed = False
    for gather in rewriter.nodes("Gather"):
        table, ids = gather.inputs
        is_rows = len(ids.shape) == 1 and gather.attrs.get("axis", 0) == 0
        if not is_weight(table) or len(table.shape) != 2 or not is_rows:
            continue
        last, scale = gather, 1.0
        after = rewriter.sole_consumer(gather.outputs[0], "Mul")
        if after is not None:
            factors = [rewriter.scalar(operand) for operand in after.inputs]
            factor = next((factor for factor in factors if factor is not None), None)
            if factor is not None:
                last, scale = after, factor
        output = last.outputs[0]
        rewriter.fused(
            "embedding",
            site_of(gather),
            inputs={"token_ids": ids, "table": table},
            outputs={"out": output},
            attributes={
                "V": table.shape[0],
                "H": table.shape[1],
                "weight_dtype": dtype_of(table),
                "scale": scale,
                "out_dtype": dtype_of(output),
            },
        )
        changed = True
    return changed


LOWER_EMBEDDING = Rewrite("lower_embedding", lower_embedding)
