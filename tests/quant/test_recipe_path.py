"""Paths of recipes: wider from step to step, best gain for a bit first, within a number of bits."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recipes import all_sites
from trtc.quant.recipe_path import PathPoint, recipe_path, within_bits

FORMATS = ("int4_g128", "int4_g32", "int8_g128", "bf16")
SHAPES = {
    "model.layers.0.self_attn.q_proj": (256, 256),
    "model.layers.0.self_attn.k_proj": (128, 256),
    "model.layers.0.self_attn.v_proj": (128, 256),
    "model.layers.0.self_attn.o_proj": (256, 256),
    "model.layers.0.mlp.gate_proj": (512, 256),
    "model.layers.0.mlp.up_proj": (512, 256),
    "model.layers.0.mlp.down_proj": (256, 96),
}
SITES = all_sites(1)
COSTS = st.lists(st.floats(0, 1), min_size=3, max_size=3).map(lambda costs: sorted(costs)[::-1])
SCORES = st.lists(COSTS, min_size=len(SITES), max_size=len(SITES)).map(
    lambda rows: {
        (site, name): cost
        for site, row in zip(SITES, rows, strict=True)
        for name, cost in zip(FORMATS[:3], row, strict=True)
    }
)


def bits_of(point: PathPoint) -> float:
    formats = point.recipe.of_linears(SHAPES)
    weights = sum(rows * columns for rows, columns in SHAPES.values())
    return sum(formats[name].num_bits(*shape) for name, shape in SHAPES.items()) / weights


@given(SCORES)
def test_a_path_goes_from_narrow_to_wide(scores: dict[tuple[str, str], float]) -> None:
    path = recipe_path(SHAPES, scores, FORMATS)
    for point in path:
        assert point.bits == pytest.approx(bits_of(point))
    for before, after in pairwise(path):
        changed = [s for s in SITES if before.recipe.formats[s] != after.recipe.formats[s]]
        assert len(changed) == 1
        assert after.bits > before.bits and after.predicted < before.predicted
    assert path[0].recipe.names["model.layers.0.mlp.down_proj"] == "int4_g32"


@given(SCORES, st.floats(4.2, 16))
def test_a_recipe_within_bits_has_no_room_for_a_gain(
    scores: dict[tuple[str, str], float], bits: float
) -> None:
    path = recipe_path(SHAPES, scores, FORMATS)
    point = within_bits(path, SHAPES, scores, bits)
    assert point.bits == pytest.approx(bits_of(point)) and point.bits <= bits
    fitting = [other for other in path if other.bits <= bits]
    assert point.predicted <= fitting[-1].predicted


def test_the_best_gain_for_a_bit_comes_first() -> None:
    scores = {(site, name): 0.0 for site in SITES for name in FORMATS}
    o, gate_up = SITES[1], SITES[2]
    scores |= {(o, "int4_g128"): 0.2, (gate_up, "int4_g128"): 0.3}
    first, second, third = recipe_path(SHAPES, scores, FORMATS)
    assert first.predicted == pytest.approx(0.5) and first.bits < 4.2
    assert second.recipe.names[o] == "int4_g32" and second.recipe.names[gate_up] == "int4_g128"
    assert third.recipe.names[gate_up] == "int4_g32" and third.predicted == 0


def test_tables_have_formats_of_their_own_and_need_no_scores() -> None:
    shapes = {**SHAPES, "lm_head": (1024, 256)}
    path = recipe_path(shapes, {("lm_head", "iq4"): 1.0}, (*FORMATS, "iq4", "iq4_g16"))
    assert path[0].recipe.names["lm_head"] == "iq4"
    assert path[0].recipe.tables.lm_head is not None and path[0].recipe.tables.embedding is None
    assert path[1].recipe.names["lm_head"] == "iq4_g16"
    assert "lm_head" not in path[1].recipe.formats


def test_of_too_few_bits_the_narrowest_is_left() -> None:
    path = recipe_path(SHAPES, {}, FORMATS)
    assert within_bits(path, SHAPES, {}, 4.0) == path[0]
