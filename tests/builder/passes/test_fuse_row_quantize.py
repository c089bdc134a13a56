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


@pytest.mark.parametrize("kind", [Tiny(), Tiny("fp8")], ids=str)
def test_other_activations_are_left_alone(kind: Tiny) -> None:
    module, _ = before(FUSE_ROW_QUANTIZE, kind)
    assert_unchanged(FUSE_ROW_QUANTIZE, module)
