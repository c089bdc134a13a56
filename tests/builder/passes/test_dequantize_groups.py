"""builder/passes/dequantize_groups.py."""

from typing import Any

import pytest

from tests.builder.passes.tiny import (
    Tiny,
    assert_preserves,
    assert_unchanged,
    attributes,
    before,
    given,
    nodes,
)
from trtc.builder.passes.dequantize_groups import DEQUANTIZE_GROUPS


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_linears_read_what_codes_stand_for(dtype: Any) -> None:
    """Sums are in another order, by which a code, and in bf16 a result, may round otherwise."""
    tolerance = 2e-6 if dtype == "f32" else 0.02
    _, new = assert_preserves(DEQUANTIZE_GROUPS, Tiny("fp8_blocks", dtype=dtype), tolerance)
    assert all("row_scale" not in given(node) for node in nodes(new, "linear"))
    for node in nodes(new, "quantize"):
        assert attributes(node)["codes"] == "f8e4m3" and attributes(node)["out_dtype"] == "f32"
        assert len(node.output) == 1


def test_rows_of_one_scale_are_left_alone() -> None:
    module, _ = before(DEQUANTIZE_GROUPS, Tiny("fp8_dynamic"))
    assert_unchanged(DEQUANTIZE_GROUPS, module)
