"""What a step reads of an engine's weights and of its KV pool."""

from collections.abc import Mapping

from trtc.plugins.moe.op import MOE
from trtc.protos.kv import CacheLayout
from trtc.protos.plan import Call, Plan

_LOOKED_UP = ("table", "table_scale", "cos", "sin")
"""Parameters of which a kernel reads one row a token."""
_OF_EXPERTS = frozenset(one.name for one in MOE.inputs if one.axes[:1] == ("L",))


def weight_bytes_read(
    plan: Plan, rows: int, chosen_shares: Mapping[str, float] | None = None
) -> int:
    """Bytes of weights that a step of `rows` tokens, all with logits, reads at least.

    Tables that are looked up count by the rows that are read; an embedding that the lm_head
    multiplies too is read whole, once. Of routed experts those count that the rows choose.

    Args:
        chosen_shares: of its experts, how many some row chooses, by a call's site; None: each row
            chooses any of them as likely as the others.
    """
    whole: set[str] = set()
    looked_up: set[str] = set()
    chosen: dict[str, float] = {}
    for call in plan.calls:
        for one in call.arguments:
            if one.kind != "weight":
                continue
            if call.operator == MOE.name and one.parameter in _OF_EXPERTS:
                expected = _share_of_experts(call, rows)
                chosen[one.name] = (chosen_shares or {}).get(call.site, expected)
            else:
                (looked_up if one.parameter in _LOOKED_UP else whole).add(one.name)
    total = 0
    for weight in plan.weights:
        if weight.name in whole:
            total += weight.bytes
        elif weight.name in chosen:
            total += round(weight.bytes * chosen[weight.name])
        elif weight.name in looked_up:
            length = max(1, weight.shape[0] if weight.shape else 1)
            total += weight.bytes * min(rows, length) // length
    return total


def _share_of_experts(call: Call, rows: int) -> float:
    """How many of all experts some row chooses, on average."""
    share = int(call.attributes["top_k"]) / int(call.axes["E"])
    return float(1 - (1 - share) ** rows)


def kv_bytes_read(kv: CacheLayout, context: int) -> int:
    """Bytes of keys and values that one new token reads at a context, of windows what they show; of
    states what it reads and writes."""
    total = 0
    for group, window in zip(kv.groups, kv.windows, strict=True):
        seen = 2 if group.is_state else context if window is None else min(context, window)
        total += seen * sum(entry.num_bytes for entry in group.entries)
    return total
