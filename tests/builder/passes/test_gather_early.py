"""builder/passes/gather_early.py."""

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    HIDDEN,
    VOCAB,
    Hand,
    Tiny,
    assert_preserves,
    assert_unchanged,
    before,
    given,
    nodes,
    ops,
)
from trtc.builder.evaluator import Evaluator
from trtc.builder.graph_writer import Value
from trtc.builder.module import Module
from trtc.builder.passes.gather_early import GATHER_EARLY


def _rows(module: Module) -> dict[str, str]:
    """The name of each tensor's first extent."""
    return {
        info.name: info.type.tensor_type.shape.dim[0].dim_param
        for info in module.model.graph.value_info
    }


@pytest.mark.parametrize(
    "kind",
    [
        Tiny(),
        Tiny("bf16", bias=True),
        Tiny("fp8"),
        Tiny("int4_awq", pre_scales=True),
        Tiny(gemma=True),
        Tiny(experts=4),
        Tiny(layers=1),
    ],
    ids=str,
)
def test_what_follows_the_last_attention_runs_on_logit_rows(kind: Tiny) -> None:
    _, new = assert_preserves(GATHER_EARLY, kind, tolerance=0.0)
    last = kind.layers - 1
    stream = f"layers.{last - 1}.mlp" if last else "embedding"
    gathered = [given(node)["x"] for node in nodes(new, "gather_rows")]
    assert len(gathered) == 2
    assert f"layers.{last}.attention.paged_attention.out" in gathered
    assert any(name.startswith(stream) for name in gathered)
    rows = _rows(new)
    for node in new.model.graph.node:
        is_last = node.name.startswith(f"layers.{last}.")
        is_tail = is_last and any(word in node.name for word in (".o", "mlp", "post"))
        for name in node.output:
            if node.op_type != "rope_kv_write" and name in rows:
                chosen = is_tail or node.name.endswith("logit_rows") or node.name == "final_norm"
                assert rows[name] == ("R" if chosen else "T"), node.name


def test_no_row_at_all_is_as_good_as_any() -> None:
    """Chunks of a prompt before its last one ask for no logits."""
    module, reader = before(GATHER_EARLY, Tiny("fp8", dtype="f32"))
    early, _ = GATHER_EARLY(module)
    steps = {
        "token_ids": [3, 4],
        "positions": [0, 1],
        "slots": [0, 1],
        "query_start": [0, 2],
        "context_lens": [2],
        "page_table": [[0]],
        "logit_rows": [],
    }
    inputs = {name: np.array(values, np.int32) for name, values in steps.items()}
    pool = np.zeros((2, 2, 4, 2, 8), np.float32)
    outputs = [
        Evaluator(one, reader).run({**inputs, "kv_0": pool, "kv_1": pool})
        for one in (module, early)
    ]
    assert outputs[1]["logits"].shape == (0, VOCAB)
    np.testing.assert_array_equal(outputs[0]["kv_1_out"], outputs[1]["kv_1_out"])


class Tail(Hand):
    """A row-wise tail under a gather, with one thing that stops it."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.input("x", "T", HIDDEN)
        self.rows = self.input("rows", "R", dtype="i32")

    def norm(self, name: str, x: Value) -> Value:
        inputs = [x, None, self.weight(f"{name}.w", HIDDEN)]
        return self.node("rms_norm", name, inputs, "T", HIDDEN, eps=1e-5, out_dtype="f32")

    def gather(self, x: Value) -> Value:
        return self.node("gather_rows", "g", [x, self.rows], "R", HIDDEN)


@pytest.mark.parametrize(
    "case", ["not rowwise", "read elsewhere", "an output", "rows of a split", "gathered output"]
)
def test_other_gathers_stay_where_they_are(case: str) -> None:
    hand = Tail()
    extra: list[Value] = []
    if case == "not rowwise":
        made = hand.x
    elif case == "rows of a split":
        sizes = hand.constant("sizes", [1, 1], "i64")
        hand.writer.node("Split", "s", [hand.x, sizes], "f32", ("T", HIDDEN), axis=0)
        made = Value("s.out", "f32", ("T", HIDDEN))
    else:
        made = hand.norm("n", hand.x)
        if case == "read elsewhere":
            extra = [hand.norm("m", made)]
        if case == "an output":
            extra = [made]
    gathered = hand.gather(made)
    out = gathered if case == "gathered output" else hand.norm("last", gathered)
    assert_unchanged(GATHER_EARLY, _with_second_part(hand, out, *extra))


def _with_second_part(hand: Hand, *outs: Value) -> Module:
    """GraphWriter's nodes have one output; a Split needs two."""
    model, recipes = hand.writer.finish(outs)
    for node in model.graph.node:
        if node.op_type == "Split":
            node.output.append("s.rest")
    module = hand.module(*outs)
    return Module(model, recipes, module.kv, module.limits)


def test_a_quantised_source_stops_it() -> None:
    hand = Tail()
    scale = hand.constant("scale", 0.5)
    codes = hand.input("codes", "T", HIDDEN, dtype="i8")
    weight = hand.weight("w", HIDDEN, HIDDEN, dtype="i8")
    inputs = [codes, weight, hand.weight("ws", HIDDEN, 1), None, scale]
    settings = {"N": HIDDEN, "weight_dtype": "i8", "out_dtype": "f32"}
    made = hand.node("linear", "l", inputs, "T", HIDDEN, **settings)
    out = hand.norm("last", hand.gather(made))
    assert_unchanged(GATHER_EARLY, hand.module(out))


def test_one_source_is_gathered_once() -> None:
    hand = Tail()
    made = hand.node("add", "sum", [hand.norm("n", hand.x), hand.x], "T", HIDDEN)
    module = hand.module(hand.norm("last", hand.gather(made)))
    early, changed = GATHER_EARLY(module)
    assert changed and ops(early)["trtc.gather_rows"] == 1
    assert nodes(early, "gather_rows")[0].name == "x.logit_rows"
    values = np.random.default_rng(0).standard_normal((5, HIDDEN)).astype(np.float32)
    rows = np.array([4, 1], np.int32)
    np.testing.assert_array_equal(
        hand.run(early, x=values, rows=rows), hand.run(module, x=values, rows=rows)
    )
