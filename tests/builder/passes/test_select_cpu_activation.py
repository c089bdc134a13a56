"""builder/passes/select_cpu_activation.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    Tiny,
    assert_unchanged,
    attributes,
    before,
    logits,
    nodes,
)
from trtc.builder.passes.select_cpu_activation import SELECT_CPU_ACTIVATION


@pytest.mark.parametrize(
    "kind",
    [
        Tiny("int4_awq"),
        Tiny("int4_awq", zero_points=True),
        Tiny("int4_awq", experts=4),
        Tiny("nvfp4_weights"),
        Tiny("nvfp4_weights", experts=4),
        Tiny("mxfp4_weights"),
    ],
    ids=str,
)
def test_4_bit_weights_get_int8_activations(kind: Tiny) -> None:
    """A stated approximation: near, and not equal."""
    old, reader = before(SELECT_CPU_ACTIVATION, kind)
    new, changed = SELECT_CPU_ACTIVATION(old)
    assert changed
    for node in nodes(new, "linear"):
        is_quantized = node.name not in ("lm_head", "layers.0.mlp.router", "layers.1.mlp.router")
        assert (attributes(node)["activation"] == "dynamic_i8") == is_quantized
    assert all(attributes(node)["act_quant"] == "dynamic_i8" for node in nodes(new, "moe"))
    expected, found = logits(old, reader), logits(new, reader)
    error = np.sqrt(np.mean((found - expected) ** 2)) / np.sqrt(np.mean(expected**2))
    assert 0 < error < 0.05
    assert_unchanged(SELECT_CPU_ACTIVATION, new)


def test_experts_of_e8m0_scales_keep_the_graphs_activations() -> None:
    old, _ = before(SELECT_CPU_ACTIVATION, Tiny("mxfp4_weights", experts=4))
    new, changed = SELECT_CPU_ACTIVATION(old)
    assert changed
    assert all(attributes(node)["act_quant"] == "none" for node in nodes(new, "moe"))


@pytest.mark.parametrize(
    "kind",
    [Tiny(), Tiny("bf16"), Tiny("fp8", experts=4), Tiny("int8_sq"), Tiny("w4a8_awq")],
    ids=str,
)
def test_other_weights_keep_the_graphs_activations(kind: Tiny) -> None:
    module, _ = before(SELECT_CPU_ACTIVATION, kind)
    assert_unchanged(SELECT_CPU_ACTIVATION, module)
