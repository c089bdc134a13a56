"""builder/passes/fuse_rope_kv_write.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
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
from tests.support.evaluate import source_module
from tests.support.models import tiny_checkpoint
from trtc.builder.graph_writer import Value
from trtc.builder.module import Module
from trtc.builder.passes.fuse_rope_kv_write import FUSE_ROPE_KV_WRITE
from trtc.builder.recipes import Array

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
class Side:
    """How q or k is made: as the real graph does, but for one thing."""

    norm: Literal["heads", "rows", "computed", "none"] = "heads"
    eps: float = 1e-5
    after: bool = False
    """The norm comes after the rotation."""
    rope: bool = True
    cos: str = "cos"
    sin: str = "sin"
    positions: str = "positions"
    rotary_dim: int = HEAD_DIM
    interleaved: int = 0
    scaled: Literal["no", "positions", "slots"] = "no"
    """By which step input the rotated rows are scaled."""
    by_heads: bool = False
    """RotaryEmbedding over [1, heads, T, D] instead of [1, T, heads * D]."""


class Attention(Hand):
    """One attention over q, k and v that come from outside, with a page of 4 tokens."""

    def __init__(
        self,
        q: Side,
        k: Side,
        *,
        read_elsewhere: bool = False,
        reader: Literal["paged_attention", "copy", "two"] = "paged_attention",
    ) -> None:
        super().__init__()
        self.steps = {name: self.input(name, "T", dtype="i32") for name in ("positions", "slots")}
        query, key, value = (
            self.input(name, "T", heads * HEAD_DIM)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        query = self._side("q", query, HEADS, q)
        key = self._side("k", key, KV_HEADS, k)
        sizes = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        shape = ("num_pages", 2, 4, KV_HEADS, HEAD_DIM)
        inputs = [key, value, self.input("kv", *shape), self.steps["slots"]]
        pool = self.node("kv_write", "l.kv", inputs, *shape, **sizes)
        outs = [pool, *([key] if read_elsewhere else [])]
        if reader != "copy":
            outs.append(self._attend("l.attention", query, pool, sizes))
        if reader == "two":
            outs.append(self._attend("l.again", query, pool, sizes))
        if reader == "copy":
            outs += [query, self.node("Identity", "l.copy", [pool], *shape)]
        self.whole = self.module(*outs)

    def _attend(self, name: str, q: Value, pool: Value, sizes: dict[str, int]) -> Value:
        given = [("query_start", ("B+1",)), ("context_lens", ("B",)), ("page_table", ("B", "P"))]
        for step, shape in given:
            if step not in self.steps:
                self.steps[step] = self.input(step, *shape, dtype="i32")
        steps = [self.steps[step] for step, _ in given]
        rest = {**sizes, "num_heads": HEADS, "scale": 0.3, "out_dtype": "f32"}
        width = HEADS * HEAD_DIM
        return self.node("paged_attention", name, [q, pool, *steps], "T", width, **rest)

    def _side(self, name: str, x: Value, heads: int, side: Side) -> Value:
        width = heads * HEAD_DIM
        if side.norm != "none" and not side.after:
            x = self._norm(name, x, heads, side)
        if not side.rope:
            return x
        row = self.constant("axis", [0], "i64")
        if side.positions not in self.steps:
            self.steps[side.positions] = self.input(side.positions, "T", dtype="i32")
        at = self.steps[side.positions]
        wide = self.node("Cast", f"{name}.wide", [at], "T", dtype="i64", to=7)
        at = self.node("Unsqueeze", f"{name}.at", [wide, row], 1, "T", dtype="i64")
        half = (side.rotary_dim or HEAD_DIM) // 2
        tables = [self._table(table, half) for table in (side.cos, side.sin)]
        shape: tuple[int | str, ...] = (1, "T", width)
        if side.by_heads:
            shape = (1, heads, "T", HEAD_DIM)
            target = self.constant(f"{name}.target", [1, heads, -1, HEAD_DIM], "i64")
            cube = self.node("Reshape", f"{name}.u", [x, target], *shape)
        else:
            cube = self.node("Unsqueeze", f"{name}.u", [x, row], *shape)
        turned = self.node(
            "RotaryEmbedding",
            f"{name}.r",
            [cube, *tables, at],
            *shape,
            interleaved=side.interleaved,
            num_heads=heads,
            rotary_embedding_dim=side.rotary_dim,
        )
        if not side.by_heads:
            flat_rows = self.node("Squeeze", f"{name}.x", [turned, row], "T", width)
            if side.after:
                flat_rows = self._norm(name, flat_rows, heads, side)
            return self._scaled(name, flat_rows, width, side)
        flat = self.constant(f"{name}.flat_shape", [-1, width], "i64")
        return self.node("Reshape", f"{name}.x", [turned, flat], "T", width)

    def _scaled(self, name: str, x: Value, width: int, side: Side) -> Value:
        if side.scaled == "no":
            return x
        inputs = [self.weight(f"{name}.factors", 16), self.steps[side.scaled]]
        factors = self.node("Gather", f"{name}.gather", inputs, "T", axis=0)
        target = self.constant(f"{name}.column", [-1, 1], "i64")
        column = self.node("Reshape", f"{name}.factor", [factors, target], "T", 1)
        return self.node("Mul", f"{name}.scaled", [x, column], "T", width)

    def _table(self, name: str, half: int) -> Value:
        if name != "computed":
            return self.weight(name, 16, half)
        if name not in self.steps:
            self.steps[name] = self.input(name, 16, half)
        return self.steps[name]

    def _norm(self, name: str, x: Value, heads: int, side: Side) -> Value:
        width = heads * HEAD_DIM
        shape = (width,) if side.norm == "rows" else (heads, HEAD_DIM)
        target = self.constant(f"{name}.s", [-1, *shape], "i64")
        split = self.node("Reshape", f"{name}.heads", [x, target], "T", *shape)
        make = self.input if side.norm == "computed" else self.weight
        weight = make(f"{name}.w", shape[-1])
        rest = {"axis": -1, "epsilon": side.eps, "stash_type": 1}
        normed = self.node("RMSNormalization", f"{name}.n", [split, weight], "T", *shape, **rest)
        flat = self.constant(f"{name}.f", [-1, width], "i64")
        return self.node("Reshape", f"{name}.flat", [normed, flat], "T", width)

    def outputs(self, module: Module) -> list[Array]:
        """Three tokens of one sequence on page 1."""
        rng = np.random.default_rng(0)
        sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        values: dict[str, Array] = {
            name: rng.standard_normal((3, size)).astype(np.float32) for name, size in sizes.items()
        }
        values["kv"] = np.zeros((2, 2, 4, KV_HEADS, HEAD_DIM), np.float32)
        steps = {"positions": [0, 1, 2], "slots": [4, 5, 6], "query_start": [0, 3]}
        steps |= {"context_lens": [3]}
        values |= {name: np.array(step, np.int32) for name, step in steps.items()}
        return self.run(module, **values, page_table=np.array([[1]], np.int32))


PLAIN, BARE, AFTER = Side(), Side(norm="none"), Side(after=True)


@pytest.mark.parametrize(
    ("q", "k", "rotary_dim", "norms"),
    [
        (PLAIN, PLAIN, HEAD_DIM, {"q_norm", "k_norm"}),
        (BARE, BARE, HEAD_DIM, set()),
        (Side(eps=0.1), BARE, HEAD_DIM, {"q_norm"}),
        (BARE, Side(eps=0.1), HEAD_DIM, {"k_norm"}),
        (Side(rotary_dim=0), PLAIN, HEAD_DIM, {"q_norm", "k_norm"}),
        (Side(rotary_dim=0), Side(rotary_dim=0), HEAD_DIM, {"q_norm", "k_norm"}),
        (Side(rotary_dim=4), Side(rotary_dim=4), 4, {"q_norm", "k_norm"}),
        (AFTER, AFTER, HEAD_DIM, {"q_norm", "k_norm"}),
    ],
)
def test_every_legal_attention_is_fused(q: Side, k: Side, rotary_dim: int, norms: set[str]) -> None:
    attention = Attention(q, k)
    fused, changed = FUSE_ROPE_KV_WRITE(attention.whole)
    assert changed and ops(fused) == {"trtc.rope_kv_write": 1, "trtc.paged_attention": 1}
    (node,) = nodes(fused, "rope_kv_write")
    assert attributes(node)["rotary_dim"] == rotary_dim
    assert attributes(node)["norm_after"] == int(q.after)
    assert {name for name in given(node) if "norm" in name} == norms
    expected, found = attention.outputs(attention.whole), attention.outputs(fused)
    for before, after in zip(expected, found, strict=True):
        np.testing.assert_allclose(after, before, atol=1e-5)


@pytest.mark.parametrize(
    "odd",
    [
        Side(interleaved=1),
        Side(cos="other"),
        Side(sin="other"),
        Side(positions="other_positions"),
        Side(eps=1e-3),
        Side(rotary_dim=4, cos="short_cos", sin="short_sin"),
        Side(rope=False),
        Side(norm="computed"),
        Side(by_heads=True, norm="none"),
        AFTER,
    ],
    ids=str,
)
@pytest.mark.parametrize("which", ["q", "k"])
def test_a_side_that_no_kernel_makes_is_left_alone(which: str, odd: Side) -> None:
    sides = (odd, PLAIN) if which == "q" else (PLAIN, odd)
    assert_unchanged(FUSE_ROPE_KV_WRITE, Attention(*sides).whole)


def test_queries_are_scaled_by_their_positions() -> None:
    attention = Attention(Side(scaled="positions"), PLAIN)
    fused, changed = FUSE_ROPE_KV_WRITE(attention.whole)
    assert changed and ops(fused) == {"trtc.rope_kv_write": 1, "trtc.paged_attention": 1}
    (node,) = nodes(fused, "rope_kv_write")
    assert given(node)["q_scale"] == "q.factors"
    expected, found = attention.outputs(attention.whole), attention.outputs(fused)
    for before, after in zip(expected, found, strict=True):
        np.testing.assert_allclose(after, before, atol=1e-5)


@pytest.mark.parametrize(
    ("q", "k"), [(Side(scaled="slots"), PLAIN), (PLAIN, Side(scaled="positions"))], ids=str
)
def test_other_scales_are_left_alone(q: Side, k: Side) -> None:
    assert_unchanged(FUSE_ROPE_KV_WRITE, Attention(q, k).whole)


def test_a_norm_over_all_heads_stays_before_the_rotation() -> None:
    attention = Attention(Side(norm="rows"), PLAIN)
    fused, changed = FUSE_ROPE_KV_WRITE(attention.whole)
    assert changed and ops(fused)["RMSNormalization"] == 1
    (node,) = nodes(fused, "rope_kv_write")
    assert {name for name in given(node) if "norm" in name} == {"k_norm"}
    expected, found = attention.outputs(attention.whole), attention.outputs(fused)
    for before, after in zip(expected, found, strict=True):
        np.testing.assert_allclose(after, before, atol=1e-5)


@pytest.mark.parametrize("side", [Side(cos="computed"), Side(sin="computed")], ids=str)
def test_computed_tables_are_left_alone(side: Side) -> None:
    assert_unchanged(FUSE_ROPE_KV_WRITE, Attention(side, side).whole)


def test_results_that_others_read_are_left_alone() -> None:
    assert_unchanged(FUSE_ROPE_KV_WRITE, Attention(PLAIN, PLAIN, read_elsewhere=True).whole)
    assert_unchanged(FUSE_ROPE_KV_WRITE, Attention(PLAIN, PLAIN, reader="two").whole)


def test_a_pool_that_something_else_reads_is_left_alone() -> None:
    assert_unchanged(FUSE_ROPE_KV_WRITE, Attention(PLAIN, PLAIN, reader="copy").whole)


def test_layers_that_read_the_keys_of_others_rotate_queries_alone(tmp_path: Path) -> None:
    module, _ = source_module(tiny_checkpoint("gemma4_e", tmp_path))
    fused, changed = FUSE_ROPE_KV_WRITE(module)
    expected = {"trtc.rope_kv_write": 4, "trtc.rope": 3, "trtc.paged_attention": 7}
    assert changed and {name: ops(fused)[name] for name in expected} == expected
    pools = {node.name: node.input[1] for node in nodes(fused, "paged_attention")}
    assert pools["layers.5.attention.paged_attention"] == "kv_2_out"
    assert pools["layers.6.attention.paged_attention"] == "kv_3_out"
    assert set(given(nodes(fused, "rope")[0])) >= {"q", "positions", "q_norm"}
