"""builder/passes/match_scale_types.py."""

import onnx
import pytest

from tests.builder.passes.tiny import Tiny, assert_same_function, assert_unchanged, tiny
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.match_scale_types import MATCH_SCALE_TYPES
from trtc.builder.recipes import Cast


@pytest.mark.parametrize("scheme", ["int4_awq", "w4a8_awq"])
def test_scales_of_groups_take_the_output_type(scheme: str) -> None:
    old, reader = tiny(Tiny(scheme, pre_scales=True))
    new, changed = run_passes(old, [MATCH_SCALE_TYPES])
    assert changed
    types = {tensor.name: tensor.data_type for tensor in new.model.graph.initializer}
    grouped = [
        node
        for node in new.model.graph.node
        if any(attribute.name == "block_size" for attribute in node.attribute)
    ]
    assert len(grouped) == 2 * 7
    assert {types[node.input[1]] for node in grouped} == {onnx.TensorProto.BFLOAT16}
    for node in grouped:
        assert new.recipes[node.input[1]] == Cast(old.recipes[node.input[1][:-5]], "bf16")
    # The scales move by a bf16 rounding each, and rounded activations downstream flip.
    assert_same_function(old, new, reader, tolerance=0.25)
    assert_unchanged(MATCH_SCALE_TYPES, new)


@pytest.mark.parametrize(
    "kind", [Tiny("fp8"), Tiny("int8_sq"), Tiny(), Tiny("int4_awq", dtype="f32")]
)
def test_other_scales_stay(kind: Tiny) -> None:
    module, _ = tiny(kind)
    assert_unchanged(MATCH_SCALE_TYPES, module)
