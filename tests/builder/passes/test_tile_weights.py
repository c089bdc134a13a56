"""builder/passes/tile_weights.py."""

from typing import Any

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    Hand,
    Loose,
    Tensors,
    Tiny,
    assert_unchanged,
    attributes,
    before,
    given,
    nodes,
)
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.tile_weights import TILE_WEIGHTS
from trtc.builder.recipes import Constant
from trtc.plugins.moe.op import MOE
from trtc.plugins.rounding import NUMPY_DTYPES

K, N, EXPERTS = 256, 48, 3


def linear(hand: Hand, dtype: str, columns: int = N, depth: int = K, group: int = 64) -> Module:
    rng = np.random.default_rng(2)
    low, high = (0, 16) if dtype == "u4" else (-8, 8)

    def weight(name: str, values: Any, kind: str) -> Any:
        return hand.weight(name, *values.shape, dtype=kind, recipe=Constant(values))

    codes = rng.integers(low, high, (columns, depth)).astype(NUMPY_DTYPES[dtype])
    scales = rng.uniform(0.5, 2, (columns, depth // group)).astype(np.float32)
    if dtype == "f4e2m1":
        scales = rng.integers(126, 129, scales.shape).astype(np.uint8)
    zeros = rng.integers(0, 16, scales.shape).astype(np.uint8)
    inputs = [
        hand.input("x", "T", depth),
        weight("w", codes, dtype),
        weight("s", scales, "u8" if dtype == "f4e2m1" else "f32"),
        weight("z", zeros, "u8") if dtype == "u4" else None,
        None,
        None,
        None,
    ]
    out = hand.node(
        "linear", "linear", inputs, "T", columns, N=columns, group_size=group, weight_dtype=dtype,
        layout="row_major", activation="exact", softcap=0.0, out_dtype="f32",
    )  # fmt: skip
    return hand.module(out)


@pytest.mark.parametrize("dtype", ["i4", "u4", "f4e2m1"])
def test_tiled_weights_are_the_same_weights(dtype: str) -> None:
    hand = Hand()
    old = linear(hand, dtype)
    new, changed = run_passes(old, [Loose(TILE_WEIGHTS)])
    assert changed
    (node,) = nodes(new, "linear")
    assert attributes(node)["layout"] == "tiles"
    for name in ("weight", "weight_scale", *(["weight_zero"] if dtype == "u4" else [])):
        assert given(node)[name].endswith(".tiles")
    x = np.random.default_rng(3).standard_normal((5, K)).astype(np.float32)
    for expected, found in zip(hand.run(old, x=x), hand.run(new, x=x), strict=True):
        assert np.array_equal(found, expected)
    assert_unchanged(TILE_WEIGHTS, new)


@pytest.mark.parametrize(
    ("columns", "depth", "group"), [(40, 256, 64), (48, 192, 64), (48, 256, 16)]
)
def test_weights_of_part_tiles_stay_row_major(columns: int, depth: int, group: int) -> None:
    assert_unchanged(TILE_WEIGHTS, linear(Hand(), "i4", columns, depth, group))


@pytest.mark.parametrize("kind", [Tiny("fp8"), Tiny("bf16"), Tiny("int4_awq", experts=3)], ids=str)
def test_other_weights_stay_row_major(kind: Tiny) -> None:
    """8-bit ones, floats, and groups that tiles do not divide into."""
    module, _ = before(TILE_WEIGHTS, kind)
    assert_unchanged(TILE_WEIGHTS, module)


def test_every_expert_is_tiled_by_itself() -> None:
    hand = Hand()
    rng = np.random.default_rng(4)
    hidden, inner = 128, 128

    def weight(name: str, *shape: int) -> Any:
        values = rng.integers(-8, 8, shape).astype(NUMPY_DTYPES["i4"])
        return hand.weight(name, *shape, dtype="i4", recipe=Constant(values))

    def scale(name: str, *shape: int) -> Any:
        values = rng.uniform(0.01, 0.02, shape).astype(np.float32)
        return hand.weight(name, *shape, recipe=Constant(values))

    inputs = [
        hand.input("x", "T", hidden),
        hand.input("logits", "T", EXPERTS),
        weight("gate_up", EXPERTS, 2 * inner, hidden),
        weight("down", EXPERTS, hidden, inner),
        scale("gate_up_scale", EXPERTS, 2 * inner, 1),
        scale("down_scale", EXPERTS, hidden, 1),
        *[None] * 7,
    ]
    out = hand.node(
        "moe", "moe", inputs, "T", hidden, I=inner, top_k=2, renormalize=1, activation="silu",
        group_size=128, weight_dtype="i4", layout="row_major", act_quant="none", out_dtype="f32",
    )  # fmt: skip
    old = hand.module(out)
    new, changed = run_passes(old, [Loose(TILE_WEIGHTS)])
    assert changed
    x = rng.standard_normal((6, hidden)).astype(np.float32)
    logits = rng.standard_normal((6, EXPERTS)).astype(np.float32)
    (expected,), (found,) = (hand.run(m, x=x, logits=logits) for m in (old, new))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(("group", "behind"), [(32, 127), (16, 0)], ids=["E8M0", "E4M3"])
def test_scales_of_e2m1_experts_get_rows_of_whole_words(group: int, behind: int) -> None:
    """What is behind the last is a number: kernels multiply it with zeros."""
    hand, hidden, width = Hand(), 96, 32
    rng = np.random.default_rng(3)
    shapes = {"gate_up": (EXPERTS, 2 * width, hidden), "down": (EXPERTS, hidden, width)}
    inputs: dict[str, Any] = {
        "x": hand.input("x", "T", hidden),
        "router_logits": hand.input("logits", "T", EXPERTS),
    }
    for name, shape in shapes.items():
        codes = rng.normal(size=shape).astype(NUMPY_DTYPES["f4e2m1"])
        scales = rng.integers(120, 127, (*shape[:2], shape[2] // group)).astype(np.uint8)
        weights = {name: (codes, "f4e2m1"), f"{name}_scale": (scales, "u8")}
        if group == 16:
            units = rng.uniform(1e-4, 2e-4, shape[:2]).astype(np.float32)
            weights[f"{name}_scale_unit"] = (units, "f32")
        for key, (values, dtype) in weights.items():
            recipe = Constant(values)
            inputs[key] = hand.weight(key, *values.shape, dtype=dtype, recipe=recipe)
    out = hand.node(
        "moe", "moe", [inputs.get(one.name) for one in MOE.inputs], "T", hidden, I=width,
        top_k=2, renormalize=1, activation="silu", group_size=group, weight_dtype="f4e2m1",
        layout="row_major", act_quant="none", out_dtype="f32",
    )  # fmt: skip
    old = hand.module(out)
    new, changed = run_passes(old, [Loose(TILE_WEIGHTS)])
    assert changed
    given_scales = [one for one in new.model.graph.initializer if one.name.endswith(".words")]
    wide = 4 if group == 32 else 8
    assert sorted(list(one.dims) for one in given_scales) == [[3, 64, wide], [3, 96, 4]]
    for scales in given_scales:
        assert (new.recipes[scales.name].load(Tensors())[..., -1] == behind).all()
    data = {
        "x": rng.normal(size=(5, hidden)).astype(np.float32),
        "logits": rng.normal(size=(5, EXPERTS)).astype(np.float32),
    }
    (before_padding,), (after,) = hand.run(old, **data), hand.run(new, **data)
    np.testing.assert_array_equal(before_padding, after)
    assert_unchanged(Loose(TILE_WEIGHTS), new)
