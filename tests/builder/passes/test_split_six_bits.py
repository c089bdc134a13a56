"""builder/passes/split_six_bits.py."""

from typing import Any

import numpy as np

from tests.builder.passes.tiny import Hand, Loose, Tiny, assert_unchanged, attributes, before, nodes
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.split_six_bits import SPLIT_SIX_BITS
from trtc.builder.recipes import Constant
from trtc.plugins.moe.op import MOE
from trtc.plugins.six_bits import LEAST, MOST

EXPERTS, HIDDEN, INNER = 3, 128, 256


def test_linears_and_experts_keep_their_weights() -> None:
    """Of which each takes three quarters of the bytes."""
    hand, rng = Hand(), np.random.default_rng(4)

    def weight(name: str, values: Any, dtype: str) -> Any:
        return hand.weight(name, *values.shape, dtype=dtype, recipe=Constant(values))

    def both(name: str, *shape: int) -> dict[str, Any]:
        codes = rng.integers(LEAST, MOST + 1, shape).astype(np.int8)
        scales = rng.uniform(-0.01, 0.01, (*shape[:-1], shape[-1] // 128)).astype(np.float32)
        return {
            name: weight(name, codes, "i8"),
            f"{name}_scale": weight(f"{name}.s", scales, "f32"),
        }

    x = hand.input("x", "T", HIDDEN)
    logits = hand.input("logits", "T", EXPERTS)
    experts = both("gate_up", EXPERTS, 2 * INNER, HIDDEN) | both("down", EXPERTS, HIDDEN, INNER)
    given = {"x": x, "router_logits": logits, **experts}
    stored = {"group_size": 128, "weight_dtype": "i6", "layout": "row_major", "out_dtype": "f32"}
    mixture = hand.node(
        "moe", "moe", [given.get(one.name) for one in MOE.inputs], "T", HIDDEN, I=INNER, top_k=2,
        renormalize=1, activation="silu", act_quant="none", **stored,
    )  # fmt: skip
    linear = both("w", 48, HIDDEN)
    out = hand.node(
        "linear", "linear", [mixture, linear["w"], linear["w_scale"]], "T", 48, N=48,
        activation="exact", softcap=0.0, **stored,
    )  # fmt: skip
    old = hand.module(out)
    new, changed = run_passes(old, [Loose(SPLIT_SIX_BITS)])
    assert changed
    for op in ("linear", "moe"):
        assert attributes(nodes(new, op)[0])["layout"] == "split"
    sizes = {one.name: list(one.dims) for one in new.model.graph.initializer}
    assert sizes["w.split"] == [48 * HIDDEN * 6 // 8]
    assert sizes["down.split"] == [EXPERTS * HIDDEN * INNER * 6 // 8]
    values = {
        "x": rng.standard_normal((6, HIDDEN)).astype(np.float32),
        "logits": rng.standard_normal((6, EXPERTS)).astype(np.float32),
    }
    (expected,), (found,) = (hand.run(module, **values) for module in (old, new))
    assert np.array_equal(found, expected)
    assert_unchanged(SPLIT_SIX_BITS, new)


def test_other_weights_stay() -> None:
    module, _ = before(SPLIT_SIX_BITS, Tiny("int8_sq", tied=True))
    assert_unchanged(SPLIT_SIX_BITS, module)
