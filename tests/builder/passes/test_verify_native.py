"""builder/passes/verify_native.py."""

import pytest

from tests.builder.passes.tiny import Hand, Tiny, assert_unchanged, before, tiny
from trtc.builder.passes.verify_native import VERIFY_NATIVE
from trtc.protos.errors import InvariantError


def test_native_graphs_pass() -> None:
    module, _ = before(VERIFY_NATIVE, Tiny("fp8"))
    assert_unchanged(VERIFY_NATIVE, module)


def test_the_first_node_that_is_left_is_named() -> None:
    module, _ = tiny(Tiny())
    with pytest.raises(InvariantError, match=r"rope\.positions: no pass lowers this Cast"):
        VERIFY_NATIVE(module)


def test_a_kv_write_without_a_rope_is_named() -> None:
    hand = Hand()
    pool = hand.input("kv", "num_pages", 2, 4, 2, 8)
    k = hand.input("k", "T", 16)
    slots = hand.input("slots", "T", dtype="i32")
    written = hand.node(
        "kv_write", "a.kv_write", [k, k, pool, slots], *pool.shape, num_kv_heads=2, head_dim=8
    )
    with pytest.raises(InvariantError, match=r"a\.kv_write: .* not fused with a rope"):
        VERIFY_NATIVE(hand.module(written))
