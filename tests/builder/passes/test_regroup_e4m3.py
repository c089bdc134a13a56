"""builder/passes/regroup_e4m3.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    HIDDEN,
    WIDTH,
    Tiny,
    assert_unchanged,
    attributes,
    given,
    logits,
    nodes,
    shape_of,
    tiny,
)
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.drop_e4m3_rounding import DROP_E4M3_ROUNDING
from trtc.builder.passes.order import NATIVE_PASSES
from trtc.builder.passes.regroup_e4m3 import GROUP, REGROUP_E4M3
from trtc.builder.recipes import TensorReader
from trtc.builder.transforms import GroupCodes, GroupScales, power_of_two_scale
from trtc.plugins.rounding import cast
from trtc.protos.errors import CheckpointError


def unrounded(kind: Tiny) -> tuple[Module, TensorReader]:
    """The module as the pass finds it."""
    module, reader = tiny(kind)
    return run_passes(module, (DROP_E4M3_ROUNDING, *NATIVE_PASSES))[0], reader


@pytest.mark.parametrize(
    "kind",
    [
        Tiny("fp8"),
        Tiny("fp8", per_tensor=True, equal_input_scales=False),
        Tiny("fp8", experts=4),
        Tiny("w4a8_awq", experts=4),
    ],
    ids=str,
)
def test_e4m3_weights_are_int8_in_groups(kind: Tiny) -> None:
    """A stated approximation: near, and not equal; experts lose their E4M3 activations too."""
    old, reader = unrounded(kind)
    new, changed = REGROUP_E4M3(old)
    assert changed
    for op, weights in (("linear", ("weight",)), ("moe", ("gate_up", "down"))):
        for before, node in zip(nodes(old, op), nodes(new, op), strict=True):
            if attributes(before)["weight_dtype"] != "f8e4m3":
                assert attributes(before) == attributes(node)
                continue
            assert attributes(node)["weight_dtype"] == "i8"
            assert attributes(node)["group_size"] == GROUP
            for name in weights:
                assert shape_of(new, given(node)[f"{name}_scale"])[-1] == 1
                assert f"{name}_input_scale" not in given(node)
    assert all(attributes(node)["act_quant"] == "none" for node in nodes(new, "moe"))
    expected, found = logits(old, reader), logits(new, reader)
    error = np.sqrt(np.mean((found - expected) ** 2)) / np.sqrt(np.mean(expected**2))
    assert 0 < error < (0.1 if kind.experts else 0.05)
    assert_unchanged(REGROUP_E4M3, new)


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "int8_sq", "int4_awq"])
def test_other_weights_stay(scheme: str) -> None:
    module, _ = unrounded(Tiny(scheme))
    assert_unchanged(REGROUP_E4M3, module)


def test_static_activations_stay() -> None:
    """Of a graph whose rounding was not dropped."""
    module, _ = run_passes(tiny(Tiny("fp8"))[0], NATIVE_PASSES)
    assert_unchanged(REGROUP_E4M3, module)


@pytest.mark.parametrize("shape", [(3, 5), (2, 7, HIDDEN), (4, 3 * WIDTH + 100)])
def test_codes_are_exact_down_to_an_eighth_of_the_largest(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(sum(shape))
    weight = cast(rng.standard_normal(shape).astype(np.float32) * 40, "f8e4m3")
    weight[0] = 0
    row_scale = rng.random((*shape[:-1], 1)).astype(np.float32)
    codes = GroupCodes(GROUP, power_of_two_scale)(weight)
    scales = GroupScales(GROUP, power_of_two_scale)(weight, row_scale)
    assert codes.dtype == np.int8 and np.abs(codes.astype(int)).max() <= 120
    assert scales.shape == (*shape[:-1], -(-shape[-1] // GROUP))
    values = weight.astype(np.float32) * row_scale
    found = codes * np.repeat(scales, GROUP, axis=-1)[..., : shape[-1]]
    for first in range(0, shape[-1], GROUP):
        group, same = values[..., first : first + GROUP], found[..., first : first + GROUP]
        largest = np.abs(group).max(axis=-1, keepdims=True)
        is_large = np.abs(group) >= largest / 8
        np.testing.assert_allclose(same[is_large], group[is_large], rtol=1e-6)
        assert np.all(np.abs(same - group) <= largest / 127.9)


def test_numbers_that_are_none_are_refused() -> None:
    weight = cast(np.ones((2, 8), np.float32), "f8e4m3")
    weight[1, 3] = np.nan
    with pytest.raises(CheckpointError, match="NaN") as refusal:
        GroupCodes(GROUP, power_of_two_scale)(weight)
    assert refusal.value.remedy
