"""builder/sharding.py, recipes of ranks and their files: who can have what, and who has it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engines import config_dict
from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.families.registry import decoder_spec
from trtc.builder.recipes import (
    Apply,
    Array,
    Cast,
    Concat,
    Constant,
    Load,
    OnFirstRank,
    Recipe,
    Reshape,
    Rows,
    Shard,
    Stack,
    load_ranks,
    recipe_of_rank,
)
from trtc.builder.sharding import check_sharding
from trtc.builder.weights_file import write_weights
from trtc.protos.errors import OutputError, RequestError
from trtc.protos.plan import Fill, Weight
from trtc.quant.scheme import SCHEMES, TensorSource

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def check(scheme: str, ranks: int, **sizes: int) -> None:
    family = "qwen3_moe" if "moe_intermediate_size" in sizes else "llama"
    spec = decoder_spec(config_dict(family, **{**SIZES, **sizes}), 64)
    named = SCHEMES[scheme]
    check_sharding(spec, named, dummy_checkpoint(spec, named)[1], ranks)
    check_sharding(spec, named, None, ranks)


@pytest.mark.parametrize(
    ("family", "sizes", "problem", "remedy"),
    [
        ("granite_moe_hybrid", {"mamba_n_heads": 4}, "the number of heads, 4,", "Use 4"),
        ("nemotron_h", {"n_groups": 2}, "the number of groups of heads, 2,", "Use 2"),
        ("qwen3_next", {}, "the number of key heads, 2,", "Use 2"),
        ("deepseek_v3", {"num_attention_heads": 2}, "the number of heads, 2,", "Use 2"),
    ],
)
def test_mixers_share_their_heads_and_channels(
    family: str, sizes: dict[str, int], problem: str, remedy: str
) -> None:
    spec = decoder_spec(config_dict(family, **{**SIZES, **sizes}), 64)
    with pytest.raises(RequestError) as caught:
        check_sharding(spec, SCHEMES["bf16"], None, 8)
    assert caught.value.problem == f"{problem} cannot be shared by 8 ranks"
    assert caught.value.remedy == remedy


def test_heads_of_a_single_group_are_shared() -> None:
    """A norm over all of them, too."""
    spec = decoder_spec(config_dict("granite_moe_hybrid", **SIZES, num_local_experts=8), 64)
    for ranks in (2, 4, 8):
        check_sharding(spec, SCHEMES["bf16"], None, ranks)
        check_sharding(spec, SCHEMES["bf16"], None, ranks, ep=True)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int8_sq", "int4_awq", "w4a8_awq"])
def test_what_divides_can_be_shared(scheme: str, ranks: int) -> None:
    check(scheme, ranks)


@pytest.mark.parametrize(
    ("scheme", "sizes", "ranks", "problem", "remedy"),
    [
        ("bf16", {"hidden_size": 1536, "num_attention_heads": 24, "num_key_value_heads": 6}, 4,
         "the number of KV heads, 6,", "Use 2"),
        ("bf16", {"hidden_size": 768, "num_attention_heads": 6, "num_key_value_heads": 2}, 4,
         "the number of heads, 6,", "Use 2"),
        ("bf16", {"hidden_size": 896, "num_attention_heads": 7, "num_key_value_heads": 7}, 2,
         "the number of heads, 7,", "Leave it out"),
        ("fp8", {"vocab_size": 1001}, 2, "the vocabulary, 1001,", "Leave it out"),
        ("fp8", {"intermediate_size": 1028}, 8, "the MLP's intermediate size, 1028,", "Use 4"),
        ("int4_awq", {"intermediate_size": 768}, 4,
         "the 6 groups of 128 channels of model.layers.0.mlp.down_proj", "Use 2"),
        ("int8_hadamard", {"intermediate_size": 768}, 8,
         "the 12 groups of 64 channels of model.layers.0.mlp.down_proj", "Use 4"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_by_name(
    scheme: str, sizes: dict[str, int], ranks: int, problem: str, remedy: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check(scheme, ranks, **sizes)
    assert caught.value.field == "--tp"
    assert caught.value.problem == f"{problem} cannot be shared by {ranks} ranks"
    assert caught.value.remedy == remedy


def test_one_rank_shares_with_nobody() -> None:
    """Whether a scheme takes such sizes is not for --tp to say."""
    check("int4_awq", 1, intermediate_size=200, vocab_size=1001)


def test_experts_share_their_own_width() -> None:
    check("bf16", 4, moe_intermediate_size=32)
    with pytest.raises(RequestError, match="intermediate size, 36,"):
        check("bf16", 8, moe_intermediate_size=36)


def test_experts_may_be_spread_whole() -> None:
    """Their widths and groups need not divide, but their number has to."""
    sizes = {**SIZES, "moe_intermediate_size": 36, "num_experts": 12}
    spec = decoder_spec(config_dict("qwen3_moe", **sizes), 64)
    check_sharding(spec, SCHEMES["bf16"], None, 4, ep=True)
    with pytest.raises(RequestError) as caught:
        check_sharding(spec, SCHEMES["bf16"], None, 8, ep=True)
    assert caught.value.problem == "the number of experts, 12, cannot be shared by 8 ranks"
    assert caught.value.remedy == "Use 4"
    grouped = {**sizes, "moe_intermediate_size": 384}
    spec = decoder_spec(config_dict("qwen3_moe", **grouped), 64)
    scheme = SCHEMES["int4_awq"]
    with pytest.raises(RequestError, match="3 groups of 128 channels"):
        check_sharding(spec, scheme, None, 2)
    check_sharding(spec, scheme, None, 2, ep=True)


def test_a_model_without_experts_has_none_to_spread() -> None:
    spec = decoder_spec(config_dict("llama", **SIZES), 64)
    with pytest.raises(RequestError, match="--ep: LlamaForCausalLM has no routed experts"):
        check_sharding(spec, SCHEMES["bf16"], None, 2, ep=True)


def test_groups_that_end_as_one_scale_may_be_cut() -> None:
    """W4A8's groups are gone before the ranks are made; W4A16's are not."""
    check("w4a8_awq", 4, intermediate_size=768)
    with pytest.raises(RequestError, match="6 groups of 128"):
        check("int4_awq", 4, intermediate_size=768)


def test_scattered_groups_are_shared() -> None:
    """After attention ranks share the output, in MLPs groups in their own order."""
    spec, scheme = decoder_spec(config_dict("llama", **SIZES), 64), SCHEMES["int4_gptq"]
    _, quantization = dummy_checkpoint(spec, scheme)
    assert quantization is not None
    order = TensorSource(("g_idx",))
    linears = {
        name: replace(linear, tensors={**linear.tensors, "column_order": order})
        for name, linear in quantization.linears.items()
    }
    for ranks in (2, 4, 8):
        check_sharding(spec, scheme, replace(quantization, linears=linears), ranks)


def test_layers_that_do_not_divide_are_on_two_ranks() -> None:
    """Seven of three columns by four ranks: the last has the second layer of the one before."""
    whole = np.arange(2 * 21).reshape(2, 21)
    recipe = Shard(Constant(whole), 1, (21,), 4, pieces=(3,))
    pieces = list(load_ranks(recipe, 4, Reader(whole)))
    for begin, piece in zip((0, 6, 12, 15), pieces, strict=True):
        np.testing.assert_array_equal(piece, whole[:, begin : begin + 6])


class Reader:
    """Counts what is read."""

    def __init__(self, value: Array) -> None:
        self.value = value
        self.reads = 0

    def read(self, name: str) -> Array:
        self.reads += 1
        return self.value


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Array, Shard]:
    """A tensor of up to three axes and a way to share it."""
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    parts = tuple(ranks * n for n in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    rank = draw(st.integers(1, 3))
    axis = draw(st.integers(0, rank - 1))
    shape = draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
    shape[axis] = sum(parts)
    dtype = draw(st.sampled_from(["float32", "int8", "int4", "float8_e4m3fn"]))
    values = np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32).astype(dtype)
    divisors = st.sampled_from([number for number in (1, 2, 4, 8) if number <= ranks])
    shares = draw(st.just(()) | st.tuples(*(divisors for _ in parts)))
    return values, Shard(Load("w"), axis, parts, ranks, shares=shares)


@given(cuts())
def test_the_ranks_have_the_whole_between_them(cut: tuple[Array, Shard]) -> None:
    """Rebuilt element by element: each part's pieces in the order of the ranks. Neighbours have the
    same where there are fewer pieces than ranks."""
    whole, recipe = cut
    reader = Reader(whole)
    pieces = list(load_ranks(recipe, recipe.ranks, reader))
    assert reader.reads == 1
    rows = [np.moveaxis(piece, recipe.axis, 0) for piece in pieces]
    expected = list(np.moveaxis(whole, recipe.axis, 0))
    begins = [0] * recipe.ranks
    found: list[Array] = []
    for index, part in enumerate(recipe.parts):
        shares = recipe.shares[index] if recipe.shares else recipe.ranks
        size, each = part // shares, recipe.ranks // shares
        ends = [begin + size for begin in begins]
        own = [list(row[begin:end]) for row, begin, end in zip(rows, begins, ends, strict=True)]
        begins = ends
        for at, copy in enumerate(own):
            np.testing.assert_array_equal(np.array(copy), np.array(own[at // each * each]))
        found += [one for piece in own[::each] for one in piece]
    assert begins == [len(one) for one in rows]
    np.testing.assert_array_equal(np.array(found), np.array(expected))
    for rank, piece in enumerate(pieces):
        alone = recipe_of_rank(recipe, rank).load(reader)
        assert alone.dtype == whole.dtype
        np.testing.assert_array_equal(alone, piece)


def test_what_is_not_cut_is_read_once_for_all() -> None:
    reader = Reader(np.arange(4, dtype=np.float32))
    assert len(list(load_ranks(Load("w"), 4, reader))) == 4
    assert reader.reads == 1
    first, *others = load_ranks(OnFirstRank(Load("w")), 3, reader)
    np.testing.assert_array_equal(first, reader.value)
    assert not np.any(others)


def test_a_function_of_what_is_cut_is_each_rank_s() -> None:
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    reader = Reader(whole)
    recipe = Apply(np.negative, (Shard(Load("w"), 0, (4, 2), 2),))
    expected = [-whole[[0, 1, 4]], -whole[[2, 3, 5]]]
    for piece, wanted in zip(load_ranks(recipe, 2, reader), expected, strict=True):
        np.testing.assert_array_equal(piece, wanted)
    assert reader.reads == 1
    for rank, wanted in enumerate(expected):
        np.testing.assert_array_equal(recipe_of_rank(recipe, rank).load(reader), wanted)


_WHOLE = np.arange(24, dtype=np.float32).reshape(6, 4)
_CUT = Shard(Load("w"), 0, (6,), 2)


@pytest.mark.parametrize(
    "recipe",
    [
        Rows(_CUT, 1, 3),
        Cast(_CUT, "bf16"),
        Reshape(_CUT, (4, 3)),
        Concat((_CUT, _CUT)),
        Stack((_CUT, Rows(Load("w"), 0, 3))),
        Shard(_CUT, 1, (4,), 2),
        OnFirstRank(_CUT),
        Apply(np.add, (Cast(_CUT, "f32"), OnFirstRank(Rows(Load("w"), 0, 3)))),
        Cast(Reshape(Concat((Rows(_CUT, 0, 1), Load("w"))), (-1,)), "f32"),
    ],
    ids=lambda recipe: type(recipe).__name__,
)
def test_ranks_differ_however_deep_the_cut_is(recipe: Recipe) -> None:
    """Compared with the recipe over what is cut by hand."""
    reader = Reader(_WHOLE)
    pieces = list(load_ranks(recipe, 2, reader))
    assert not np.array_equal(pieces[0], pieces[1])
    for rank, piece in enumerate(pieces):
        expected = _by_hand(recipe, rank).load(reader)
        assert piece.dtype == expected.dtype
        np.testing.assert_array_equal(piece, expected)
        np.testing.assert_array_equal(recipe_of_rank(recipe, rank).load(reader), expected)


def _by_hand(recipe: Any, rank: int) -> Recipe:
    """The recipe with each cut replaced by its result."""
    if recipe == _CUT:
        return Constant(_WHOLE[3 * rank : 3 * rank + 3])
    if hasattr(recipe, "rank"):
        inner = _by_hand(recipe.source, rank).load(Reader(_WHOLE))
        if isinstance(recipe, OnFirstRank):
            return Constant(inner * (rank == 0))
        return Constant(inner[:, 2 * rank : 2 * rank + 2])
    if hasattr(recipe, "source"):
        return replace(recipe, source=_by_hand(recipe.source, rank))
    if hasattr(recipe, "sources"):
        return replace(recipe, sources=tuple(_by_hand(one, rank) for one in recipe.sources))
    return recipe


def test_each_rank_has_its_file(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    recipes: dict[str, Recipe] = {
        "cut": Shard(Constant(whole), 0, (4, 2), 2),
        "bias": OnFirstRank(Constant(np.ones(3, np.float32))),
        "same": Constant(np.full(5, 7, np.int8)),
    }
    shapes = {"cut": ("f32", (3, 4)), "bias": ("f32", (3,)), "same": ("i8", (5,))}
    weights = [
        Weight(
            name=name,
            dtype=dtype,  # type: ignore[arg-type]
            shape=shape,
            layout="row_major",
            offset=64 * at,
            bytes=int(np.prod(shape)) * (4 if dtype == "f32" else 1),
            fill=Fill(element="f32"),
        )
        for at, (name, (dtype, shape)) in enumerate(shapes.items())
    ]
    paths = [tmp_path / f"rank{rank}" for rank in (0, 1)]
    write_weights(paths, weights, recipes, Reader(whole), lambda message: None)
    first, second = (safetensors.numpy.load_file(path) for path in paths)
    np.testing.assert_array_equal(first["cut"], whole[[0, 1, 4]])
    np.testing.assert_array_equal(second["cut"], whole[[2, 3, 5]])
    np.testing.assert_array_equal(first["bias"] + second["bias"], np.ones(3))
    np.testing.assert_array_equal(first["same"], second["same"])


def test_room_for_all_ranks_is_asked_for_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    weight = Weight(
        name="w",
        dtype="u8",
        shape=(1000,),
        layout="row_major",
        offset=0,
        bytes=1000,
        fill=Fill(element="u8"),
    )
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3000))
    recipes = {"w": Constant(np.zeros(1000, np.uint8))}
    reader = Reader(np.zeros(0))
    paths = [tmp_path / str(rank) for rank in range(4)]
    write_weights(paths[:1], [weight], recipes, reader, lambda message: None)
    with pytest.raises(OutputError):
        write_weights(paths, [weight], recipes, reader, lambda message: None)
    assert not (tmp_path / "1").exists()
