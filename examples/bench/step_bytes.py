"""What a step reads of an engine's weights."""

from trtc.protos.plan import Plan

_LOOKED_UP = ("table", "table_scale", "cos", "sin")
"""Parameters of which a kernel reads one row a token."""


def weight_bytes_read(plan: Plan, rows: int) -> int:
    """Bytes of weights that a step of `rows` tokens, all with logits, reads at least.

    Tables that are looked up count by the rows that are read; an embedding that the lm_head
    multiplies too is read whole, once.
    """
    whole: set[str] = set()
    looked_up: set[str] = set()
    for call in plan.calls:
        for one in call.arguments:
            if one.kind == "weight":
                (looked_up if one.parameter in _LOOKED_UP else whole).add(one.name)
    total = 0
    for weight in plan.weights:
        if weight.name in whole:
            total += weight.bytes
        elif weight.name in looked_up:
            length = max(1, weight.shape[0] if weight.shape else 1)
            total += weight.bytes * min(rows, length) // length
    return total
