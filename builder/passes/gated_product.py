"""What a swiglu gates, where one linear makes both halves."""

from trtc.builder.passes.matching import Node, input_of, is_fused, producer
from trtc.builder.passes.rewriter import Rewriter


def gated_product(rewriter: Rewriter, swiglu: Node) -> Node | None:
    """The linear whose first half is gate and whose second is up, for this swiglu alone."""
    halves = [input_of(swiglu, name) for name in ("gate", "up")]
    split = producer(halves[0], "Split")
    if split is None or list(map(id, split.outputs)) != list(map(id, halves)):
        return None
    linear = producer(split.inputs[0])
    alone = all(rewriter.sole_consumer(tensor) for tensor in (*halves, split.inputs[0]))
    return linear if alone and is_fused(linear, "linear") else None
