"""builder/passes/standard_routing.py."""

from typing import Any

import numpy as np
import pytest

from tests.builder.passes.tiny import Hand
from tests.support.moe_calls import ROUTERS
from trtc.builder.graph_writer import Value
from trtc.builder.passes.base import Rewrite
from trtc.builder.passes.rewriter import Rewriter
from trtc.builder.passes.standard_nodes import StandardNodes
from trtc.builder.passes.standard_routing import expert_weights
from trtc.builder.recipes import Array
from trtc.plugins.moe.op import MOE
from trtc.plugins.moe.routing import Routing, route

EXPERTS, TOP_K = 12, 3


def experts_weights(logits: Array, bias: Array | None, fields: dict[str, Any]) -> Array:
    """[T, E]: the weight of each expert for each row, in the place of what moe gives."""
    hand = Hand()
    weights = {
        "gate_up": np.zeros((EXPERTS, 2, EXPERTS), np.float32),
        "down": np.zeros((EXPERTS, EXPERTS, 1), np.float32),
        **({} if bias is None else {"choice_bias": bias}),
    }
    inputs: dict[str, Value] = {
        "x": hand.input("x", "T", EXPERTS),
        "router_logits": hand.input("logits", "T", EXPERTS),
        **{name: hand.constant(name, array) for name, array in weights.items()},
    }
    moe = hand.node(
        "moe", "layers.0.mlp.moe", [inputs.get(one.name) for one in MOE.inputs], "T", EXPERTS,
        I=1, top_k=TOP_K, activation="silu", weight_dtype="f32", out_dtype="f32", **fields,
    )  # fmt: skip

    def rewrite(rewriter: Rewriter) -> bool:
        (node,) = rewriter.fused_nodes("moe")
        dense = expert_weights(rewriter, node, node.inputs[1])
        nodes = StandardNodes(rewriter, "layers.0.mlp")
        flat = nodes.make("Squeeze", "flat", [dense, nodes.axes(2)], "f32", [EXPERTS, "T"])
        rewriter.node("Transpose", "layers.0.mlp.last", [flat], node.outputs[:1], {"perm": [1, 0]})
        return True

    module, _ = Rewrite("rewrite", rewrite)(hand.module(moe))
    (found,) = hand.run(module, x=np.zeros_like(logits), logits=logits)
    return np.asarray(found)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("renormalize", [0, 1])
@pytest.mark.parametrize("biased", [False, True])
def test_the_weights_are_those_of_the_definition(
    router: str, renormalize: int, biased: bool
) -> None:
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((9, EXPERTS)).astype(np.float32)
    logits[0] = 1  # ties go to the lower expert
    bias = rng.uniform(-0.5, 0.5, EXPERTS).astype(np.float32) if biased else None
    fields: dict[str, Any] = {**ROUTERS[router], "renormalize": renormalize}
    found = experts_weights(logits, bias, fields)
    routing = {name: value for name, value in fields.items() if name != "weighs_inputs"}
    experts, weights = route(logits, bias, Routing(TOP_K, **routing))
    expected = np.zeros_like(logits)
    np.put_along_axis(expected, experts, weights, axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
