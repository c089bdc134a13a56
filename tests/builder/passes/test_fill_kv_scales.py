"""builder/passes/fill_kv_scales.py."""

import pytest

from tests.builder.passes.tiny import Tiny, assert_same_function, assert_unchanged, tiny
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.fill_kv_scales import FILL_KV_SCALES


@pytest.mark.parametrize("kind", [Tiny("bf16"), Tiny("bf16", kv_dtype="f8e4m3")], ids=str)
def test_absent_scales_become_one_and_change_no_bit(kind: Tiny) -> None:
    old, reader = tiny(kind)
    new, changed = run_passes(old, [FILL_KV_SCALES])
    assert changed
    for node in new.model.graph.node:
        if node.domain == "trtc":
            assert [name for name in node.input if not name] == []
            assert len(node.input) == {"kv_write": 6, "paged_attention": 7}[node.op_type]
    assert_same_function(old, new, reader, tolerance=0.0)
    assert_unchanged(FILL_KV_SCALES, new)
