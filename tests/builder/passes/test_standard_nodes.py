"""builder/passes/standard_nodes.py."""

import numpy as np

from tests.builder.passes.tiny import Hand
from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.passes.standard_nodes import StandardNodes


def test_nodes_take_the_place_of_another() -> None:
    """x [T, 4] -> the larger of each pair, plus a half; of equal ones the first."""
    hand = Hand()
    x = hand.input("x", "T", 4)
    module = hand.module(hand.node("Identity", "site.last", [x], "T", 2))

    def rewrite(rewriter: Rewriter) -> bool:
        (old,) = rewriter.nodes("Identity")
        nodes = StandardNodes(rewriter, "site")
        given = old.inputs[0]
        assert nodes.cast("same", given, "f32") is given
        pairs = nodes.reshape("pairs", given, ["T", 2, 2])
        highest, _ = nodes.top("highest", pairs, ["T", 2, 1])
        flat = nodes.reshape("flat", highest, ["T", 2])
        total = nodes.make("Add", "sum", [flat, nodes.number("half", 0.5)], "f32", ["T", 2])
        rewriter.node("Identity", "site.new", [total], old.outputs[:1], {})
        return True

    new, _ = Rewrite("rewrite", rewrite)(module)
    assert all(node.name.startswith("site.") for node in new.model.graph.node)
    (found,) = hand.run(new, x=np.asarray([[1, 2, 4, 3], [5, 5, -1, -2]], np.float32))
    np.testing.assert_array_equal(found, [[2.5, 4.5], [5.5, -0.5]])
