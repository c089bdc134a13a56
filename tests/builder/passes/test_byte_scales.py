"""builder/passes/byte_scales.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    Tiny,
    attributes,
    given,
    logits,
    nodes,
    shape_of,
    tiny,
)
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.byte_scales import BYTE_SCALES
from trtc.builder.passes.order import NATIVE_PASSES
from trtc.builder.passes.pack_weights import PACK_WEIGHTS
from trtc.builder.passes.tile_weights import TILE_WEIGHTS
from trtc.builder.transforms import ScaleCodes
from trtc.protos.errors import CheckpointError


@pytest.mark.parametrize("kind", [Tiny("iq4", bias=True), Tiny("iq4", experts=4)], ids=str)
def test_scales_of_linears_become_bytes_and_no_logit_changes(kind: Tiny) -> None:
    module, reader = tiny(kind)
    old, _ = run_passes(module, NATIVE_PASSES)
    new, changed = BYTE_SCALES(old)
    assert changed
    linears = [node for node in nodes(new, "linear") if attributes(node)["weight_dtype"] == "iq4"]
    assert linears
    for node in linears:
        rows, groups = shape_of(new, given(node)["weight_scale"])
        assert shape_of(new, given(node)["scale_unit"]) == (rows,)
        assert groups > 1
    assert all("scale_unit" not in given(node) for node in nodes(new, "moe"))
    np.testing.assert_array_equal(logits(new, reader), logits(old, reader))
    for layout in (PACK_WEIGHTS, TILE_WEIGHTS):
        stored, _ = layout(new)
        np.testing.assert_array_equal(logits(stored, reader), logits(old, reader))


@pytest.mark.parametrize("scheme", ["int4_awq", "nvfp4_weights", "mxfp4_weights"])
def test_other_weights_keep_their_scales(scheme: str) -> None:
    old, _ = run_passes(tiny(Tiny(scheme))[0], NATIVE_PASSES)
    assert not BYTE_SCALES(old)[1]


def test_a_scale_that_no_byte_stands_for_is_refused() -> None:
    with pytest.raises(CheckpointError, match="scale is none that iq4 weights have"):
        ScaleCodes()(np.array([[1.0, 1.01]], np.float32))
