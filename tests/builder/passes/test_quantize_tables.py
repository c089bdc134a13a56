"""builder/passes/quantize_tables.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    VOCAB,
    Hand,
    Loose,
    Tiny,
    assert_unchanged,
    attributes,
    before,
    given,
    logits,
    nodes,
    shape_of,
)
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.byte_scales import BYTE_SCALES
from trtc.builder.passes.pack_weights import PACK_WEIGHTS
from trtc.builder.passes.quantize_tables import QuantizeTables
from trtc.builder.passes.select_cpu_activation import SELECT_CPU_ACTIVATION
from trtc.builder.passes.split_six_bits import SPLIT_SIX_BITS
from trtc.builder.passes.tile_weights import TILE_WEIGHTS
from trtc.builder.transforms import GroupCodes, GroupScales
from trtc.plugins.layouts import MOST_IN_PLANES
from trtc.quant.site_format import TABLE_FORMATS, TableFormats

GROUP = 128
INT8 = QuantizeTables(TableFormats(TABLE_FORMATS["int8_g128"]))


@pytest.mark.parametrize("kind", [Tiny("bf16"), Tiny("int4_awq", tied=True)], ids=str)
def test_the_lm_head_is_int8_in_groups(kind: Tiny) -> None:
    """A stated approximation: near, and not equal."""
    old, reader = before(INT8, kind)
    new, changed = INT8(old)
    assert changed
    *others, head = nodes(new, "linear")
    assert attributes(head)["weight_dtype"] == "i8"
    assert attributes(head)["group_size"] == GROUP
    assert all(attributes(node)["weight_dtype"] != "i8" for node in others)
    assert shape_of(new, given(head)["weight_scale"]) == (VOCAB, 1)
    expected, found = logits(old, reader), logits(new, reader)
    error = np.sqrt(np.mean((found - expected) ** 2)) / np.sqrt(np.mean(expected**2))
    assert 0 < error < 0.05
    assert_unchanged(INT8, new)


def test_a_tied_table_is_stored_once() -> None:
    old, _ = before(INT8, Tiny("bf16", tied=True))
    new, _ = INT8(old)
    head, lookup = nodes(new, "linear")[-1], nodes(new, "embedding")[0]
    assert given(lookup)["table"] == given(head)["weight"]
    assert given(lookup)["table_scale"] == given(head)["weight_scale"]
    names = {tensor.name for tensor in new.model.graph.initializer}
    assert "embedding.weight" not in names


def test_a_table_of_its_own_keeps_its_type() -> None:
    old, _ = before(INT8, Tiny("bf16"))
    new, _ = INT8(old)
    assert given(nodes(new, "embedding")[0]) == given(nodes(old, "embedding")[0])


@pytest.mark.parametrize("name", ["iq4", "iq4_g16", "int6_g128"])
@pytest.mark.parametrize("tied", [True, False])
def test_tables_of_4_and_6_bits_are_near_and_kernels_layouts_change_no_value(
    name: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole panels and tiles; what both read is stored once, on either target."""
    monkeypatch.setattr("tests.builder.passes.tiny.VOCAB", 48)
    monkeypatch.setattr("tests.builder.passes.tiny.HIDDEN", 128)
    to = TABLE_FORMATS[name]
    step = QuantizeTables(TableFormats(to, to))
    old, reader = before(step, Tiny("bf16", tied=tied))
    narrow, _ = step(old)
    expected, found = logits(old, reader), logits(narrow, reader)
    error = np.sqrt(np.mean((found - expected) ** 2)) / np.sqrt(np.mean(expected**2))
    assert 0 < error < (0.1 if to.weight == "i6" else 0.35)
    assert_unchanged(step, narrow)
    for passes, layout in (
        ((BYTE_SCALES, PACK_WEIGHTS), "packed"),
        ((TILE_WEIGHTS, SPLIT_SIX_BITS), "split" if to.weight == "i6" else "tiles"),
    ):
        stored, _ = run_passes(narrow, [Loose(one) for one in passes])
        assert np.array_equal(logits(narrow, reader), logits(stored, reader))
        head, lookup = nodes(stored, "linear")[-1], nodes(stored, "embedding")[0]
        assert attributes(head)["weight_dtype"] == to.weight
        assert attributes(head)["group_size"] == attributes(lookup)["group_size"]
        assert (given(lookup)["table"] == given(head)["weight"]) is tied
        assert (given(lookup)["table_scale"] == given(head)["weight_scale"]) is tied
        # Groups of 16 do not fall into tiles.
        lies = "row_major" if layout == "tiles" and to.group_size == 16 else layout
        assert attributes(head)["layout"] == lies
        # Codes of 6 bits that no linear reads are stored in 6 bits as well.
        alone = lies if to.weight == "i6" else "row_major"
        assert attributes(lookup).get("layout", "row_major") == (lies if tied else alone)


def test_an_embedding_may_be_narrow_alone() -> None:
    step = QuantizeTables(TableFormats(embedding=TABLE_FORMATS["int8_g128"]))
    old, _ = before(step, Tiny("bf16"))
    new, changed = step(old)
    assert changed and given(nodes(new, "linear")[-1]) == given(nodes(old, "linear")[-1])
    assert "table_scale" in given(nodes(new, "embedding")[0])


def test_linears_that_give_no_logits_stay() -> None:
    hand = Hand()
    x = hand.input("x", "T", 8)
    out = hand.node("add", "sum", [x, x], "T", 8)
    assert_unchanged(INT8, hand.module(out))


def test_f32_models_stay() -> None:
    module, _ = before(INT8, Tiny())
    assert_unchanged(INT8, module)


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


@pytest.mark.parametrize("vocab", [40, 48])
@pytest.mark.parametrize("is_exact", [True, False])
def test_packing_keeps_a_table_in_one_place(
    vocab: int, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way both readers see the weights that they saw before; those that int8 activations are
    multiplied with lie in planes."""
    monkeypatch.setattr("tests.builder.passes.tiny.VOCAB", vocab)
    old, reader = before(INT8, Tiny("bf16", tied=True))
    narrow, _ = INT8(old)
    if not is_exact:
        narrow, _ = SELECT_CPU_ACTIVATION(narrow)
    packed, _ = PACK_WEIGHTS(narrow)
    assert np.array_equal(logits(narrow, reader), logits(packed, reader))
    head, lookup = nodes(packed, "linear")[-1], nodes(packed, "embedding")[0]
    assert given(lookup)["table"] == given(head)["weight"]
    assert attributes(head)["layout"] == ("packed" if is_exact else "planes")
    assert attributes(lookup)["layout"] == attributes(head)["layout"]
