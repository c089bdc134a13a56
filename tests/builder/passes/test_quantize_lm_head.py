"""builder/passes/quantize_lm_head.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    VOCAB,
    Hand,
    Tiny,
    assert_unchanged,
    attributes,
    before,
    given,
    logits,
    nodes,
    shape_of,
)
from trtc.builder.passes.pack_weights import PACK_WEIGHTS
from trtc.builder.passes.quantize_lm_head import GROUP, QUANTIZE_LM_HEAD
from trtc.builder.passes.select_cpu_activation import SELECT_CPU_ACTIVATION
from trtc.builder.transforms import GroupCodes, GroupScales
from trtc.plugins.layouts import MOST_IN_PLANES


@pytest.mark.parametrize("kind", [Tiny("bf16"), Tiny("int4_awq", tied=True)], ids=str)
def test_the_lm_head_is_int8_in_groups(kind: Tiny) -> None:
    """A stated approximation: near, and not equal."""
    old, reader = before(QUANTIZE_LM_HEAD, kind)
    new, changed = QUANTIZE_LM_HEAD(old)
    assert changed
    *others, head = nodes(new, "linear")
    assert attributes(head)["weight_dtype"] == "i8"
    assert attributes(head)["group_size"] == GROUP
    assert all(attributes(node)["weight_dtype"] != "i8" for node in others)
    assert shape_of(new, given(head)["weight_scale"]) == (VOCAB, 1)
    expected, found = logits(old, reader), logits(new, reader)
    error = np.sqrt(np.mean((found - expected) ** 2)) / np.sqrt(np.mean(expected**2))
    assert 0 < error < 0.05
    assert_unchanged(QUANTIZE_LM_HEAD, new)


def test_a_tied_table_is_stored_once() -> None:
    old, _ = before(QUANTIZE_LM_HEAD, Tiny("bf16", tied=True))
    new, _ = QUANTIZE_LM_HEAD(old)
    head, lookup = nodes(new, "linear")[-1], nodes(new, "embedding")[0]
    assert given(lookup)["table"] == given(head)["weight"]
    assert given(lookup)["table_scale"] == given(head)["weight_scale"]
    names = {tensor.name for tensor in new.model.graph.initializer}
    assert "embedding.weight" not in names


def test_a_table_of_its_own_keeps_its_type() -> None:
    old, _ = before(QUANTIZE_LM_HEAD, Tiny("bf16"))
    new, _ = QUANTIZE_LM_HEAD(old)
    assert given(nodes(new, "embedding")[0]) == given(nodes(old, "embedding")[0])


def test_linears_that_give_no_logits_stay() -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    out = hand.node("add", "sum", [x, x], "T", 8)
    assert_unchanged(QUANTIZE_LM_HEAD, hand.module(out))


def test_f32_models_stay() -> None:
    module, _ = before(QUANTIZE_LM_HEAD, Tiny())
    assert_unchanged(QUANTIZE_LM_HEAD, module)


@pytest.mark.parametrize("depth", [5, 128, 300])
def test_codes_times_scales_are_within_half_a_step(depth: int) -> None:
    weight = np.random.default_rng(depth).standard_normal((7, depth)).astype(np.float32)
    weight[3] = 0
    codes, scales = GroupCodes(GROUP)(weight), GroupScales(GROUP)(weight)
    assert codes.dtype == np.int8 and scales.shape == (7, -(-depth // GROUP))
    wide = np.repeat(scales, GROUP, axis=1)[:, :depth]
    assert np.all(np.abs(codes * wide - weight) <= wide * 0.5001)
    assert np.abs(codes).max() == MOST_IN_PLANES
    assert not codes[3].any()


@pytest.mark.parametrize(("vocab", "is_whole"), [(40, False), (48, True)])
@pytest.mark.parametrize("is_exact", [True, False])
def test_packing_keeps_a_table_of_whole_blocks_in_one_place(
    vocab: int, is_whole: bool, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way both readers see the weights that they saw before; those that int8 activations are
    multiplied with lie in planes."""
    monkeypatch.setattr("tests.builder.passes.tiny.VOCAB", vocab)
    old, reader = before(QUANTIZE_LM_HEAD, Tiny("bf16", tied=True))
    narrow, _ = QUANTIZE_LM_HEAD(old)
    if not is_exact:
        narrow, _ = SELECT_CPU_ACTIVATION(narrow)
    packed, _ = PACK_WEIGHTS(narrow)
    assert np.array_equal(logits(narrow, reader), logits(packed, reader))
    head, lookup = nodes(packed, "linear")[-1], nodes(packed, "embedding")[0]
    assert (given(lookup)["table"] == given(head)["weight"]) is is_whole
    assert attributes(head)["layout"] == ("packed" if is_exact else "planes")
    if is_whole:
        assert attributes(lookup)["layout"] == attributes(head)["layout"]
