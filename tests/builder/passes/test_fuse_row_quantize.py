"""builder/passes/fuse_row_quantize.py."""

import pytest

from tests.builder.passes.tiny import (
    GROUP,
    Tiny,
    assert_preserves,
    assert_unchanged,
    attributes,
    before,
    given,
    nodes,
    ops,
)
from trtc.builder.passes.fuse_row_quantize import FUSE_ROW_QUANTIZE


@pytest.mark.parametrize(
    ("kind", "out_dtype"),
    [
        (Tiny("fp8_dynamic"), "f8e4m3"),
        (Tiny("int8_dynamic", pre_scales=True, equal_pre_scales=True), "i8"),
        (Tiny("fp8_blocks", gemma=True, dtype="f32"), "f8e4m3"),
        (Tiny("int8_hadamard"), "i8"),
    ],
    ids=str,
)
def test_norms_and_swiglu_give_rows_their_scales(kind: Tiny, out_dtype: str) -> None:
    old, new = assert_preserves(FUSE_ROW_QUANTIZE, kind, tolerance=0.0)
    if kind.scheme != "int8_dynamic":
        assert ops(old)["trtc.quantize"] == 8
        assert {node.name.rsplit(".", 2)[1] for node in nodes(new, "quantize")} == {"o"}
    block = GROUP if kind.scheme == "int8_hadamard" else 0
    for node in nodes(new, "swiglu"):
        assert attributes(node)["out_dtype"] == out_dtype
        assert attributes(node).get("hadamard", 0) == block
        assert node.output[1] == next(
            given(reader)["row_scale"]
            for reader in nodes(new, "linear")
            if given(reader)["x"] == node.output[0]
        )


@pytest.mark.parametrize("scheme", ["fp8_dynamic", "int8_dynamic"])
def test_a_norm_that_others_read_gives_its_result_as_it_is_too(scheme: str) -> None:
    kind = Tiny(scheme, experts=4, shared="gated")
    _, new = assert_preserves(FUSE_ROW_QUANTIZE, kind, tolerance=0.0)
    norms = {node.name: node for node in nodes(new, "rms_norm")}
    products = {node.name: given(node) for node in nodes(new, "linear")}
    experts = {node.name: given(node) for node in nodes(new, "moe")}
    for layer in range(2):
        codes, _, row_scale, normed = norms[f"layers.{layer}.mlp_norm"].output
        product = products[f"layers.{layer}.mlp.shared.gate_up"]
        assert (product["x"], product["row_scale"]) == (codes, row_scale)
        assert experts[f"layers.{layer}.mlp.moe"]["x"] == normed
    assert {node.name.rsplit(".", 2)[1] for node in nodes(new, "quantize")} == {"o"}


@pytest.mark.parametrize("kind", [Tiny(), Tiny("fp8")], ids=str)
def test_other_activations_are_left_alone(kind: Tiny) -> None:
    module, _ = before(FUSE_ROW_QUANTIZE, kind)
    assert_unchanged(FUSE_ROW_QUANTIZE, module)
