"""builder/passes/shard.py: the ranks together are the whole model."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest

from tests.builder.passes.test_order import FEATURES, NARROW, QUANTIZED
from tests.builder.passes.tiny import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LIMITS,
    VOCAB,
    WIDTH,
    Hand,
    Loose,
    Tensors,
    Tiny,
    attributes,
    given,
    logits,
    logits_of,
    nodes,
    ops,
    scheme_of,
    shape_of,
    tiny,
)
from tests.support.caches import kv_heads
from tests.support.engines import LivelyReader, config_dict
from tests.support.models import FAMILIES
from tests.support.ranks import ShardedRun, joined_layout, module_of_rank
from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.families.registry import decoder_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.module import Module
from trtc.builder.passes.base import Pass, run_passes
from trtc.builder.passes.order import cuda_passes
from trtc.builder.passes.shard import ShardOverRanks
from trtc.builder.recipes import Array, OnFirstRank, Shard, TensorReader
from trtc.protos.errors import InvariantError
from trtc.quant.scheme import SCHEMES, Scheme


def both(kind: Tiny, ranks: int = 2, *, ep: bool = False) -> tuple[Module, Module, Tensors]:
    """The native module that is sharded, the sharded one, and their checkpoint."""
    module, reader = tiny(kind)
    whole, _ = run_passes(module, before_shard(scheme_of(kind), reader, ranks))
    sharded, changed = run_passes(whole, [Loose(ShardOverRanks(ranks, ep))])
    assert changed
    return whole, sharded, reader


def before_shard(scheme: Scheme, reader: TensorReader, ranks: int) -> tuple[Pass, ...]:
    """The passes of a model of several ranks up to the one that shards it."""
    passes = cuda_passes(scheme, reader, ranks)
    shard = next(at for at, one in enumerate(passes) if isinstance(one, ShardOverRanks))
    return passes[:shard]


def of_ranks(sharded: Module, reader: TensorReader, whole: Module, ranks: int = 2) -> Any:
    layout = joined_layout(whole.kv, sharded.kv, ranks)
    return logits_of(ShardedRun(sharded, reader, ranks), layout)


ALL_SCATTERED = "q k v o gate up down"
SCATTERED = [
    Tiny("int4_gptq", scattered=ALL_SCATTERED, bias=True),
    Tiny("int4_gptq", scattered=ALL_SCATTERED, experts=4),
    Tiny("int8_sq", scattered=ALL_SCATTERED, bias=True),
    Tiny("int8_sq", scattered=ALL_SCATTERED, experts=4),
]


@pytest.mark.parametrize("kind", [*FEATURES, *QUANTIZED, *SCATTERED[2:]], ids=str)
def test_two_ranks_compute_what_one_does(kind: Tiny) -> None:
    whole, sharded, reader = both(replace(kind, dtype="f32"))
    expected = logits(whole, reader)
    found = of_ranks(sharded, reader, whole)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    "kind", [*QUANTIZED, *NARROW, *SCATTERED, Tiny("int8_hadamard", bias=True)], ids=str
)
def test_bf16_ranks_are_as_near_to_f32_as_the_whole(kind: Tiny) -> None:
    exact_module, exact_reader = tiny(replace(kind, dtype="f32"))
    exact = logits(exact_module, exact_reader)
    whole, sharded, reader = both(kind)
    assert_as_near(exact, whole, sharded, reader)


def assert_as_near(exact: Array, whole: Module, sharded: Module, reader: TensorReader) -> None:
    # By the median row: an undecided router may choose another expert for one of them.
    errors = [
        np.median(np.sqrt(np.mean((found - exact) ** 2, axis=1)))
        for found in (logits(whole, reader), of_ranks(sharded, reader, whole))
    ]
    assert errors[1] <= 1.5 * errors[0]


class Remembered:
    """A checkpoint that every rank reads: what was read stays."""

    def __init__(self, reader: TensorReader) -> None:
        self.read = cache(reader.read)


SIZES: Mapping[str, Mapping[str, int]] = {
    "gemma4": {"num_global_key_value_heads": 4},
    "gpt_oss": {"num_local_experts": 4},
    "granite_moe_hybrid": {"num_local_experts": 4},
    "llama4": {"num_local_experts": 4},
    "nemotron_h": {"n_groups": 4},
    "nemotron_h_moe": {"n_groups": 4},
    "olmo_hybrid": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen3_5": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
"""What variants whose names begin so need for four ranks, beside the sizes of all."""


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        *((family, "fp32") for family in FAMILIES),
        *((family, "fp8") for family in ("qwen2", "gemma2", "mixtral")),
        *(
            (family, "fp8")
            for family in (
                *("deepseek_v2_lite", "granite_moe_hybrid", "minimax_m2", "nemotron_h"),
                "qwen3_next",
            )
        ),
        ("qwen3_next", "int8_sq"),
        *(("llama_biased", scheme) for scheme in ("int8_sq", "w4a8_awq")),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_every_family_runs_on_four_ranks(family: str, scheme: str) -> None:
    """Compared in f32, whatever the weights are: in bf16 each rank's part is rounded."""
    whole, sharded, reader = sharded_family(family, scheme, 4)
    assert_same_logits(whole, sharded, reader, 4, scheme)


@pytest.mark.parametrize(
    ("family", "heads"),
    [("llama", 2), ("llama", 1), ("olmo2", 2), ("gpt_oss", 1), ("gemma4_e", 2), ("gemma4_e", 1)],
)
def test_ranks_share_kv_heads_of_which_there_are_fewer(family: str, heads: int) -> None:
    whole, sharded, reader = sharded_family(family, "fp32", 4, num_key_value_heads=heads)
    assert kv_heads(whole.kv) == {heads}
    assert kv_heads(sharded.kv) == {1}
    assert_same_logits(whole, sharded, reader, 4, "fp32")


@pytest.mark.parametrize(("ranks", "layers"), [(2, 6), (2, 7), (4, 7), (8, 7)])
def test_ranks_share_the_table_of_the_inputs_of_layers(ranks: int, layers: int) -> None:
    """By layers, and where these do not divide some are on two ranks. One gathering of it, as of
    logits, and two sums a layer as in any decoder."""
    names = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    kinds = [*(names * 2)[: layers - 1], "full_attention"]
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "layer_types": kinds}
    whole, sharded, reader = sharded_family("gemma4_e", "fp32", ranks, **sizes)
    (node,), (of_one,) = nodes(sharded, "layer_inputs"), nodes(whole, "layer_inputs")
    rows, columns = shape_of(whole, given(of_one)["table"])
    width = columns // layers
    assert shape_of(sharded, given(node)["table"]) == (rows, -(-layers // ranks) * width)
    counts = ops(sharded)
    assert (counts["trtc.all_gather"], counts["trtc.all_reduce"]) == (2, 2 * layers)
    assert_same_logits(whole, sharded, reader, ranks, "fp32")


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [("granite_moe_hybrid", {}), ("nemotron_h_moe", {"n_groups": 1, "mamba_num_heads": 8})],
)
def test_ranks_share_the_norm_of_a_single_group(
    family: str, sizes: dict[str, Any], ranks: int
) -> None:
    """Each gives the sum of its squares, which is one number a row, and has B and C whole."""
    whole, sharded, reader = sharded_family(family, "fp32", ranks, **sizes)
    assert not nodes(whole, "rms_scale")
    scales = nodes(sharded, "rms_scale")
    assert len(scales) == len(nodes(sharded, "mamba2")) == len(nodes(whole, "mamba2")) > 0
    for node, of_one in zip(nodes(sharded, "mamba2"), nodes(whole, "mamba2"), strict=True):
        found, expected = attributes(node), attributes(of_one)
        assert (found["groups"], found["heads"]) == (1, expected["heads"] // ranks)
        assert "norm" not in given(node)
        width = expected["heads"] * expected["head_dim"]
        assert {attributes(scale)["width"] for scale in scales} == {width}
        assert shape_of(sharded, given(scales[0])["weight"]) == (width // ranks,)
    assert_same_logits(whole, sharded, reader, ranks, "fp32")


@pytest.mark.parametrize("family", ["gemma4_e", "granite_moe_hybrid"])
def test_bf16_ranks_of_a_family_are_as_near_to_f32_as_the_whole(family: str) -> None:
    """What ranks exchange of norms and of the inputs of layers is rounded, too."""
    exact = logits(*sharded_family(family, "fp32", 2)[::2])
    whole, sharded, reader = sharded_family(family, "bf16", 2, dtype="bf16")
    assert_as_near(exact, whole, sharded, reader)


def sharded_family(
    family: str,
    scheme: str,
    ranks: int,
    *,
    ep: bool = False,
    dtype: Literal["f32", "bf16"] = "f32",
    **more: Any,
) -> tuple[Module, Module, TensorReader]:
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    for beginning, own in SIZES.items():
        if family.startswith(beginning):
            sizes |= own
    sizes |= more
    spec = decoder_spec(config_dict(family, **sizes), LIMITS.max_seq_len)
    named = replace(SCHEMES[scheme], dtype=dtype)
    dummy, quantization = dummy_checkpoint(spec, named)
    reader = Remembered(LivelyReader(dummy, named))
    request = GraphRequest(named, dtype, LIMITS, quantization, 4)
    whole, _ = run_passes(build_graph(spec, request, reader), before_shard(named, reader, ranks))
    sharded, _ = run_passes(whole, [Loose(ShardOverRanks(ranks, ep))])
    return whole, sharded, reader


def assert_same_logits(
    whole: Module, sharded: Module, reader: TensorReader, ranks: int, scheme: str
) -> None:
    expected = logits(whole, reader)
    found = of_ranks(sharded, reader, whole, ranks)
    largest = np.abs(expected).max()
    assert largest > 0.1
    assert np.median(np.abs(found - expected)) <= 1e-6 * largest
    # A value on the edge between two E4M3 numbers may fall to the other side.
    edges = 0.05 if SCHEMES[scheme].activation == "f8e4m3" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=0, atol=edges * largest)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        *((family, "fp32") for family in ("deepseek_v3", "glm_moe_dsa", "gpt_oss")),
        *((family, "fp32") for family in ("granite_moe_hybrid", "llama4", "nemotron_h_moe")),
        *((family, "fp8") for family in ("mixtral", "qwen3_5_moe")),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_two_ranks_with_half_of_the_experts_compute_what_one_does(family: str, scheme: str) -> None:
    """Experts whose width does not divide may be spread so."""
    whole, sharded, reader = sharded_family(family, scheme, 2, ep=True)
    moes = nodes(sharded, "moe")
    assert moes
    for node, of_one in zip(moes, nodes(whole, "moe"), strict=True):
        (experts, *rest), (all_experts, *same) = (
            shape_of(one, given(moe)["down"]) for one, moe in ((sharded, node), (whole, of_one))
        )
        assert (2 * experts, rest) == (all_experts, same)
    assert_same_logits(whole, sharded, reader, 2, scheme)


def test_ranks_have_the_orders_of_their_experts() -> None:
    whole, sharded, reader = both(replace(SCATTERED[-1], dtype="f32"), ep=True)
    (order,) = {shape_of(sharded, given(moe)["gate_up_order"]) for moe in nodes(sharded, "moe")}
    assert order == (2, HIDDEN)
    expected = logits(whole, reader)
    found = of_ranks(sharded, reader, whole)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("ep", "gate_up", "down"), [(True, 128, 32), (False, 64, 32)])
def test_ranks_have_the_units_of_their_rows(ep: bool, gate_up: int, down: int) -> None:
    kind = Tiny("nvfp4_weights", experts=4)
    whole, sharded, reader = both(kind, ep=ep)
    for moe in nodes(sharded, "moe"):
        experts = 2 if ep else 4
        assert shape_of(sharded, given(moe)["gate_up_scale_unit"]) == (experts, gate_up)
        assert shape_of(sharded, given(moe)["down_scale_unit"]) == (experts, down)
    exact_module, exact_reader = tiny(replace(kind, dtype="f32"))
    assert_as_near(logits(exact_module, exact_reader), whole, sharded, reader)


def test_sums_of_one_term_are_equal_to_the_bit() -> None:
    """Every row of o and down has one weight that is not zero: no order of adding can show."""

    class OneTerm(Tensors):
        def read(self, name: str) -> Array:
            values = super().read(name)
            if name.endswith((".o.weight", ".down.weight")):
                rows = np.arange(len(values))
                kept = np.zeros_like(values)
                columns = rows * 7 % values.shape[1]
                kept[rows, columns] = values[rows, columns] + 1
                return kept
            return values

    whole, sharded, reader = both(Tiny(bias=True, head_norm=True))
    lonely = OneTerm()
    lonely.shapes = reader.shapes
    np.testing.assert_array_equal(of_ranks(sharded, lonely, whole), logits(whole, lonely))


def test_a_rank_has_its_heads_channels_and_words() -> None:
    whole, sharded, _ = both(Tiny(bias=True))
    assert kv_heads(sharded.kv) == {KV_HEADS // 2}
    counts = ops(sharded)
    assert (counts["trtc.all_reduce"], counts["trtc.all_gather"]) == (2 * 2, 1)
    linears = {node.name: node for node in nodes(sharded, "linear")}
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM // 2
    for name, shape in (
        ("layers.0.attention.qkv", (width, HIDDEN)),
        ("layers.0.attention.o", (HIDDEN, HEADS * HEAD_DIM // 2)),
        ("layers.0.mlp.gate_up", (WIDTH, HIDDEN)),
        ("layers.0.mlp.down", (HIDDEN, WIDTH // 2)),
        ("lm_head", (VOCAB // 2, HIDDEN)),
    ):
        assert shape_of(sharded, given(linears[name])["weight"]) == shape, name
        assert attributes(linears[name])["N"] == shape[0]
    attention = attributes(nodes(sharded, "paged_attention")[0])
    assert (attention["num_heads"], attention["num_kv_heads"]) == (HEADS // 2, KV_HEADS // 2)
    assert ops(whole)["trtc.linear"] == counts["trtc.linear"]


@pytest.mark.parametrize("kind", SCATTERED, ids=str)
def test_scattered_groups_read_the_heads_of_all_ranks(kind: Tiny) -> None:
    """And each rank multiplies by some of the rows: no sum is rounded by rank."""
    _, sharded, _ = both(kind)
    counts = ops(sharded)
    assert (counts["trtc.all_reduce"], counts["trtc.all_gather"]) == (2, 2 * 2 + 1)
    assert counts["trtc.gather_columns"] == 2 * (2 if kind.experts else 3)
    o = next(node for node in nodes(sharded, "linear") if node.name.endswith(".attention.o"))
    inputs = given(o)
    assert shape_of(sharded, inputs["weight"]) == (HIDDEN // 2, HEADS * HEAD_DIM)
    if kind.bias:
        assert shape_of(sharded, inputs["bias"]) == (HIDDEN // 2,)


def test_what_is_not_cut_is_the_whole_weight() -> None:
    _, sharded, _ = both(Tiny(experts=4, head_norm=True))
    assert shape_of(sharded, "embedding.weight") == (VOCAB, HIDDEN)
    router = next(node for node in nodes(sharded, "linear") if "router" in node.name)
    assert not given(router)["weight"].endswith(".shard")
    assert attributes(nodes(sharded, "moe")[0])["I"] == WIDTH // 2


def test_tied_embeddings_are_whole_for_lookups_and_cut_for_logits() -> None:
    _, sharded, _ = both(Tiny(tied=True))
    assert given(nodes(sharded, "embedding")[0])["table"] == "embedding.weight"
    head = next(node for node in nodes(sharded, "linear") if node.name == "lm_head")
    assert given(head)["weight"] == "embedding.weight.shard"


@pytest.mark.parametrize(
    "kind",
    [
        Tiny("fp8", bias=True, fused=True),
        Tiny("int8_sq", pre_scales=True),
        Tiny("int4_awq", zero_points=True),
        Tiny("int4_awq", experts=4),
        Tiny("nvfp4_weights", bias=True),
        Tiny("int8_hadamard", experts=4),
    ],
    ids=str,
)
def test_the_ranks_weights_together_are_the_whole_ones(kind: Tiny) -> None:
    whole, sharded, reader = both(kind)
    ranks = [module_of_rank(sharded, rank).recipes for rank in (0, 1)]
    cut = 0
    for name, recipe in sharded.recipes.items():
        pieces = [recipes[name].load(reader) for recipes in ranks]
        if not isinstance(recipe, Shard):
            if not isinstance(recipe, OnFirstRank):
                np.testing.assert_array_equal(pieces[0], pieces[1])
            continue
        expected = whole.recipes[name.removesuffix(".shard")].load(reader)
        halves = [np.split(piece, _ends(recipe), axis=recipe.axis) for piece in pieces]
        joined = [half for part in zip(*halves, strict=True) for half in part]
        found = np.concatenate(joined, axis=recipe.axis)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        cut += 1
    assert cut >= 2 * 4


def _ends(recipe: Shard) -> list[int]:
    """Where in a rank's piece the second and later parts begin."""
    return np.cumsum([part // recipe.ranks for part in recipe.parts])[:-1].tolist()


def test_a_bias_after_a_sum_is_added_once() -> None:
    _, sharded, reader = both(Tiny(bias=True))
    down = next(node for node in nodes(sharded, "linear") if node.name.endswith(".down"))
    name = given(down)["bias"]
    first, second = (module_of_rank(sharded, rank).recipes[name].load(reader) for rank in (0, 1))
    assert np.abs(first).min() > 0
    np.testing.assert_array_equal(second, np.zeros_like(first))


def test_all_ranks_run_one_graph() -> None:
    _, sharded, _ = both(Tiny("fp8", experts=4))
    other = module_of_rank(sharded, 1)
    assert other.model is sharded.model and other.kv == sharded.kv
    changed = {name for name in sharded.recipes if sharded.recipes[name] != other.recipes[name]}
    cut = {name for name in sharded.recipes if name.endswith(".shard") and "sizes" not in name}
    assert changed == cut


def test_the_given_module_stays_and_the_result_is_final() -> None:
    whole, sharded, _ = both(Tiny())
    assert kv_heads(whole.kv) == {KV_HEADS} and ops(whole)["trtc.all_reduce"] == 0
    assert whole.model.graph.input[7].type.tensor_type.shape.dim[3].dim_value == KV_HEADS
    assert sharded.model.graph.input[7].type.tensor_type.shape.dim[3].dim_value == KV_HEADS // 2
    again, changed = ShardOverRanks(2)(sharded)
    assert not changed and again is sharded
    twice = [ShardOverRanks(2)(whole)[0].model.SerializeToString(deterministic=True) for _ in "ab"]
    assert twice[0] == twice[1]


@pytest.mark.parametrize(
    ("kind", "ranks", "message"),
    [
        (Tiny(), 8, "4 in units of 1 by 8 ranks"),
        (Tiny(), 3, "the heads of k: 2 by 3 ranks"),
    ],
)
def test_what_cannot_be_shared_is_refused(kind: Tiny, ranks: int, message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        both(kind, ranks)


class Tail(Hand):
    """swiglu and a linear by its channels, with something that forbids the cut."""

    def build(self, settings: Mapping[str, Any], *, residual: bool) -> Module:
        x = self.input("x", "T", HIDDEN)
        gate, up = (self.linear(name, x, WIDTH) for name in ("gate", "up"))
        activated = self.node(
            "swiglu", "act", [gate, up], "T", WIDTH, activation="silu", out_dtype="f32"
        )
        down = self.linear("down", activated, HIDDEN, x if residual else None, **settings)
        norm = self.weight("norm", HIDDEN)
        return self.module(
            self.node("rms_norm", "n", [down, None, norm], "T", HIDDEN, eps=1e-5, out_dtype="f32")
        )

    def linear(self, name: str, x: Any, columns: int, residual: Any = None, **settings: Any) -> Any:
        weight = self.weight(f"{name}.weight", columns, x.shape[1])
        inputs = [x, weight, None, None, None, None, residual]
        fixed = {"N": columns, "weight_dtype": "f32", "out_dtype": "f32"}
        return self.node("linear", name, inputs, "T", columns, **fixed, **settings)


@pytest.mark.parametrize(
    ("settings", "residual", "message"),
    [
        ({}, True, "down: every rank would add the residual"),
        ({"softcap": 3.0}, False, "down: a softcap needs the whole sum"),
    ],
)
def test_what_would_be_done_on_every_rank_is_refused(
    settings: Mapping[str, Any], residual: bool, message: str
) -> None:
    module = Tail().build(settings, residual=residual)
    with pytest.raises(InvariantError, match=message):
        ShardOverRanks(2)(module)


def test_a_part_where_the_whole_is_needed_is_refused() -> None:
    hand = Tail()
    x = hand.input("x", "T", HIDDEN)
    gate, up = (hand.linear(name, x, WIDTH) for name in ("gate", "up"))
    settings = {"activation": "silu", "out_dtype": "f32"}
    activated = hand.node("swiglu", "act", [gate, up], "T", WIDTH, **settings)
    total = hand.node("add", "sum", [activated, activated], "T", WIDTH)
    with pytest.raises(InvariantError, match=r"sum: add needs the whole of act\.out"):
        ShardOverRanks(2)(hand.module(total))
