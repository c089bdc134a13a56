"""Plans of real graphs: sound memory, views, weights; and graphs that cannot be lowered."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.support.caches import kv_heads, uniform_layout
from tests.support.engines import config_dict
from tests.support.evaluate import LIMITS, PAGE_SIZE
from trtc.builder.checkpoint.dummy import DummyReader, dummy_checkpoint
from trtc.builder.families.registry import decoder_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.order import cpu_passes, cuda_passes
from trtc.builder.plan import make_plan
from trtc.plugins.registry import REGISTRY
from trtc.protos.dtypes import DTYPES
from trtc.protos.errors import InvariantError
from trtc.protos.plan import Plan, buffer_bytes, read_plan
from trtc.quant.scheme import SCHEMES

SIZES = {"hidden_size": 128, "intermediate_size": 256}


def native(family: str, scheme: str = "fp32", **overrides: Any) -> tuple[Module, DummyReader]:
    spec = decoder_spec(config_dict(family, **{**SIZES, **overrides}), LIMITS.max_seq_len)
    named = SCHEMES[scheme]
    reader, quantization = dummy_checkpoint(spec, named)
    request = GraphRequest(named, named.dtype, LIMITS, quantization, PAGE_SIZE)
    module = build_graph(spec, request, reader)
    return run_passes(module, cpu_passes(named, reader, exact_activations=False))[0], reader


def plan_of(family: str, scheme: str = "fp32", **overrides: Any) -> Plan:
    return make_plan(native(family, scheme, **overrides)[0], REGISTRY)


PLANS = [
    ("llama", "fp32"),
    ("llama", "int8_sq"),
    ("llama", "int4_awq"),
    ("gemma2", "bf16"),
    ("qwen3", "fp8"),
    ("phi3", "fp32"),
    ("qwen3_moe", "bf16"),
]


@pytest.mark.parametrize(("family", "scheme"), PLANS)
def test_a_buffer_is_never_overwritten_while_it_is_needed(family: str, scheme: str) -> None:
    """Replays the plan over byte intervals, knowing nothing of lives."""
    plan = plan_of(family, scheme)
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    owner: dict[str, tuple[int, int]] = {}
    for call in plan.calls:
        outputs = {p.name for p in REGISTRY[call.operator].outputs}
        used = [argument for argument in call.arguments if argument.kind == "buffer"]
        for argument in used:
            if argument.parameter not in outputs:
                assert argument.name in owner, f"{call.site} reads {argument.name}, now overwritten"
        for argument in used:
            if argument.parameter in outputs:
                buffer = buffers[argument.name]
                begin, end = buffer.offset, buffer.offset + buffer_bytes(buffer, plan.limits)
                allowed = REGISTRY[call.operator].overwrites.get(argument.parameter)
                inputs = {a.name for a in used if a.parameter not in {*outputs, allowed}}
                for name, (other_begin, other_end) in list(owner.items()):
                    if begin < other_end and other_begin < end and name != argument.name:
                        assert name not in inputs, f"{call.site} writes over its input {name}"
                        del owner[name]
                owner[argument.name] = (begin, end)
    assert max(end for _, end in owner.values()) <= plan.arena_bytes


@pytest.mark.parametrize(("family", "scheme"), PLANS)
def test_weights_are_aligned_and_in_order_of_use(family: str, scheme: str) -> None:
    plan = plan_of(family, scheme)
    end = 0
    for weight in plan.weights:
        assert weight.offset % 64 == 0
        assert 0 <= weight.offset - end < 64
        assert weight.bytes == DTYPES[weight.dtype].num_bytes(int(np.prod(weight.shape)))
        end = weight.offset + weight.bytes
    assert plan.weights_bytes == -(-end // 64) * 64
    used = dict.fromkeys(
        a.name for call in plan.calls for a in call.arguments if a.kind == "weight"
    )
    assert list(used) == [weight.name for weight in plan.weights]


def test_arena_does_not_grow_with_depth() -> None:
    assert (
        plan_of("llama", num_hidden_layers=2).arena_bytes
        == plan_of("llama", num_hidden_layers=12).arena_bytes
    )


def test_the_residual_stream_stays_in_one_place() -> None:
    plan = plan_of("llama", num_hidden_layers=4)
    places = {buffer.name: buffer.offset for buffer in plan.buffers}
    sums = [
        (residual.name, out.name)
        for call in plan.calls
        if call.axes["M"] == "T"
        for residual in call.arguments
        for out in call.arguments
        if residual.parameter == "residual" and out.parameter == "out"
    ]
    assert len(sums) >= 6  # the last layer's may be of the logit rows only
    assert len({places[name] for pair in sums for name in pair}) == 1


def test_split_parts_are_views_of_one_buffer() -> None:
    plan = plan_of("llama")
    rope = next(call for call in plan.calls if call.operator == "rope_kv_write")
    q, k, v = (next(a for a in rope.arguments if a.parameter == name) for name in ("q", "k", "v"))
    assert q.name == k.name == v.name
    assert (q.column_offset, k.column_offset, v.column_offset) == (0, 128, 192)
    assert q.row_stride == k.row_stride == v.row_stride == 256
    assert (q.columns, k.columns, v.columns) == (128, 64, 64)


def test_inputs_of_as_many_layers_as_published_are_views() -> None:
    """Their number is that of the sizes of a Split."""
    kinds = ["sliding_attention", "full_attention"] * 18
    plan = plan_of("gemma4_e", num_hidden_layers=len(kinds), layer_types=kinds)
    (inputs,) = (call for call in plan.calls if call.operator == "layer_inputs")
    made = next(one.name for one in inputs.arguments if one.parameter == "out")
    read = [
        one.column_offset
        for call in plan.calls
        for one in call.arguments
        if one.name == made and call is not inputs
    ]
    assert sorted(set(read)) == [8 * layer for layer in range(len(kinds))]


def test_only_the_tail_runs_on_logit_rows() -> None:
    plan = plan_of("llama")
    rows = [str(call.axes["M"]) for call in plan.calls]
    assert rows == sorted(rows, reverse=True) and set(rows) == {"T", "R"}
    assert rows[-2:] == ["R", "R"]
    assert plan.calls[-1].arguments[-1].kind == "logits"
    assert plan.vocab_size == 160


def test_every_layer_writes_and_reads_its_own_pool() -> None:
    plan = plan_of("llama", num_hidden_layers=3)
    pools = [
        (call.operator, argument.index)
        for call in plan.calls
        for argument in call.arguments
        if argument.parameter == "pool"
    ]
    layers = range(3)
    assert pools == [(o, i) for i in layers for o in ("rope_kv_write", "paged_attention")]


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = plan_of("llama", "int8_sq")
    path = tmp_path / "plan.json"
    path.write_bytes(plan.to_json())
    assert read_plan(path) == plan
    assert plan_of("llama", "int8_sq").to_json() == plan.to_json()


def graph_of(nodes: list[onnx.NodeProto], *, columns: int = 8) -> Module:
    """A graph around `nodes` that embeds tokens into `x` [T, columns]."""
    weights = [
        onnx.helper.make_tensor("table", 1, [16, columns], np.zeros(16 * columns)),
        onnx.helper.make_tensor("sizes", 7, [2], [3, columns - 3]),
    ]
    embedding = onnx.helper.make_node(
        "embedding",
        ["token_ids", "table"],
        ["x"],
        "embed",
        domain=TRTC_DOMAIN,
        V=16,
        H=columns,
        weight_dtype="f32",
        out_dtype="f32",
    )
    tokens = onnx.helper.make_tensor_value_info("token_ids", 6, ["T"])
    logits = onnx.helper.make_tensor_value_info("logits", 1, ["R", columns])
    graph = onnx.helper.make_graph([embedding, *nodes], "g", [tokens], [logits], weights)
    kv = uniform_layout(num_layers=1, page_size=8, num_kv_heads=1, head_dim=8, dtype="f32")
    return Module(onnx.helper.make_model(graph), {}, kv, LIMITS)


def trtc_node(
    op: str, inputs: list[str], outputs: list[str], **attributes: object
) -> onnx.NodeProto:
    return onnx.helper.make_node(op, inputs, outputs, "site.x", domain=TRTC_DOMAIN, **attributes)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (onnx.helper.make_node("MatMul", ["x", "table"], ["y"], "site.x"), r"ai\.onnx\.MatMul"),
        (trtc_node("conv", ["x"], ["y"]), r"trtc\.conv"),
        (trtc_node("gather_rows", ["x"], ["y"]), "rows"),
        (trtc_node("gather_rows", ["x", "nowhere"], ["y"]), "nowhere"),
        (trtc_node("gather_rows", ["x", "logit_rows"], []), "out"),
        (trtc_node("gather_rows", ["x", "logit_rows"], ["y"], speed=1), "speed"),
        (trtc_node("add", ["x", "table"], ["y"]), "add"),
        (onnx.helper.make_node("Split", ["table", "sizes"], ["a", "b"], "site.x"), "site.x"),
        (
            onnx.helper.make_node("Split", ["x", "sizes"], ["a", "b"], "site.x", axis=0),
            "only columns",
        ),
    ],
)
def test_what_cannot_be_lowered_is_named(node: onnx.NodeProto, message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        make_plan(graph_of([node]), REGISTRY)


def test_split_with_sizes_that_do_not_add_up() -> None:
    node = onnx.helper.make_node("Split", ["x", "sizes"], ["a", "b"], "site.x", axis=1)
    module = graph_of([node])
    module.model.graph.initializer[1].CopyFrom(onnx.helper.make_tensor("sizes", 7, [2], [3, 4]))
    with pytest.raises(InvariantError, match="do not add up to 8"):
        make_plan(module, REGISTRY)


def test_fewer_logit_rows_take_less_of_the_arena() -> None:
    """A sharded lm_head gives a buffer of rows as wide as a rank's vocabulary."""
    vocab_size, ranks = 32768, 2
    spec = decoder_spec(config_dict("llama", vocab_size=vocab_size), LIMITS.max_seq_len)
    scheme = SCHEMES["fp32"]
    reader, _ = dummy_checkpoint(spec, scheme)
    source = build_graph(spec, GraphRequest(scheme, "f32", LIMITS, None, PAGE_SIZE), reader)
    module, _ = run_passes(source, cuda_passes(scheme, reader, ranks))
    row = 4 * vocab_size // ranks
    for given, most in ((None, LIMITS.max_num_tokens), (4, 4)):
        plan = make_plan(module, REGISTRY, max_logit_rows=given)
        assert most * row <= plan.arena_bytes < 2 * most * row
        assert plan.vocab_size == vocab_size and kv_heads(plan.kv) == {1}
