"""builder/passes/fuse_rope_kv_write.py."""

from dataclasses import dataclass

import pytest

from tests.builder.passes.tiny import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    attributes,
    given,
    nodes,
    ops,
)
from trtc.builder.graph_writer import Value
from trtc.builder.module import Module
from trtc.builder.passes.fuse_rope_kv_write import FUSE_ROPE_KV_WRITE

GONE = ("RotaryEmbedding", "Reshape", "Squeeze", "Unsqueeze", "Cast", "trtc.kv_write")


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (Tiny(), 2e-6),
        (Tiny(head_norm=True), 2e-6),
        (Tiny(fused=True, bias=True), 2e-6),
        (Tiny("bf16", head_norm=True), 0.02),
        (Tiny("fp8", kv_dtype="f8e4m3", dtype="f32"), 2e-3),
    ],
    ids=str,
)
def test_norm_rope_and_write_are_one(kind: Tiny, tolerance: float) -> None:
    _, new = assert_preserves(FUSE_ROPE_KV_WRITE, kind, tolerance)
    assert not any(ops(new)[op] for op in GONE)
    assert ops(new)["RMSNormalization"] == 2 * 2 + 1
    first = nodes(new, "rope_kv_write")[0]
    inputs, settings = given(first), attributes(first)
    assert {"q_norm", "k_norm"} <= set(inputs) if kind.head_norm else "q_norm" not in inputs
    assert ("k_scale" in inputs and "v_scale" in inputs) == (kind.kv_dtype == "f8e4m3")
    assert inputs["positions"] == "positions" and inputs["pool"] == "kv_0"
    assert settings["rotary_dim"] == (HEAD_DIM // 2 if kind.fused else HEAD_DIM)
    assert (settings["num_heads"], settings["num_kv_heads"]) == (HEADS, KV_HEADS)
    assert first.output[1] == "kv_0_out"
    assert nodes(new, "paged_attention")[0].input[0] == first.output[0]


@dataclass(frozen=True)
class Odd:
    """One attention, with one thing that the real graph never has."""

    interleaved: int = 0
    other_table: bool = False
    other_eps: bool = False
    read_elsewhere: bool = False
    no_rope: bool = False
    whole_row_norm: bool = False


def _attention(odd: Odd) -> Module:
    hand = Hand()
    q = hand.input("q", "T", HEADS * HEAD_DIM)
    k, v = (hand.input(name, "T", KV_HEADS * HEAD_DIM) for name in "kv")
    row = hand.constant("axis", [0], "i64")
    wide = hand.node(
        "Cast", "wide", [hand.input("positions", "T", dtype="i32")], "T", dtype="i64", to=7
    )
    at = hand.node("Unsqueeze", "at", [wide, row], 1, "T", dtype="i64")
    tables = [hand.weight(name, 64, HEAD_DIM // 2) for name in ("cos", "sin", "other")]

    def rope(x: Value, name: str, heads: int, cos: Value, eps: float) -> Value:
        width = heads * HEAD_DIM
        norm_shape = (width,) if odd.whole_row_norm else (heads, HEAD_DIM)
        target = hand.constant(f"{name}.s", [-1, *norm_shape], "i64")
        split = hand.node("Reshape", f"{name}.heads", [x, target], "T", *norm_shape)
        weight = hand.weight(f"{name}.w", norm_shape[-1])
        normed = hand.node(
            "RMSNormalization",
            f"{name}.n",
            [split, weight],
            "T",
            *norm_shape,
            axis=-1,
            epsilon=eps,
            stash_type=1,
        )
        flat_shape = hand.constant(f"{name}.f", [-1, width], "i64")
        flat = hand.node("Reshape", f"{name}.flat", [normed, flat_shape], "T", width)
        if odd.no_rope:
            return flat
        cube = hand.node("Unsqueeze", f"{name}.u", [flat, row], 1, "T", width)
        turned = hand.node(
            "RotaryEmbedding",
            f"{name}.r",
            [cube, cos, tables[1], at],
            1,
            "T",
            width,
            interleaved=odd.interleaved,
            num_heads=heads,
            rotary_embedding_dim=HEAD_DIM,
        )
        return hand.node("Squeeze", f"{name}.x", [turned, row], "T", width)

    q = rope(q, "q", HEADS, tables[0], 1e-5)
    k_eps = 1e-3 if odd.other_eps else 1e-5
    k = rope(k, "k", KV_HEADS, tables[2 if odd.other_table else 0], k_eps)
    sizes = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    pool_shape = ("num_pages", 2, 4, KV_HEADS, HEAD_DIM)
    slots = hand.input("slots", "T", dtype="i32")
    pool = hand.node(
        "kv_write", "l.kv", [k, v, hand.input("kv", *pool_shape), slots], *pool_shape, **sizes
    )
    steps = [
        hand.input("query_start", "B+1", dtype="i32"),
        hand.input("context_lens", "B", dtype="i32"),
        hand.input("page_table", "B", "P", dtype="i32"),
    ]
    width = HEADS * HEAD_DIM
    out = hand.node(
        "paged_attention",
        "l.attention",
        [q, pool, *steps],
        "T",
        width,
        **sizes,
        num_heads=HEADS,
        scale=0.3,
        out_dtype="f32",
    )
    return hand.module(out, pool, *([k] if odd.read_elsewhere else []))


def test_the_plain_case_is_fused() -> None:
    fused, changed = FUSE_ROPE_KV_WRITE(_attention(Odd()))
    assert changed and ops(fused) == {"trtc.rope_kv_write": 1, "trtc.paged_attention": 1}


@pytest.mark.parametrize(
    "odd",
    [
        Odd(interleaved=1),
        Odd(other_table=True),
        Odd(other_eps=True),
        Odd(read_elsewhere=True),
        Odd(no_rope=True),
        Odd(whole_row_norm=True),
    ],
    ids=str,
)
def test_other_attention_is_left_alone(odd: Odd) -> None:
    module = _attention(odd)
    assert_unchanged(FUSE_ROPE_KV_WRITE, module)
