"""builder/recipe_budget.py: recipes of a number of bytes, over a search that is made up."""

from dataclasses import dataclass

import pytest

from tests.support.recipes import all_sites
from trtc.builder.recipe_budget import Budget, within_size
from trtc.protos.errors import AccuracyError
from trtc.quant.recipe import FormatRecipe
from trtc.quant.recipe_path import PathPoint, recipe_path, within_bits
from trtc.quant.site_format import site_of

FORMATS = ("int4_g128", "iq4_g16", "int8", "bf16")
SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(4)
    for name, shape in {
        "self_attn.q_proj": (256, 256),
        "self_attn.k_proj": (256, 256),
        "self_attn.v_proj": (256, 256),
        "self_attn.o_proj": (256, 256),
        "mlp.gate_proj": (512, 256),
        "mlp.up_proj": (512, 256),
        "mlp.down_proj": (256, 512),
    }.items()
}
SCORES = {
    (site, name): (at + 1) * cost
    for at, site in enumerate(all_sites(4))
    for name, cost in zip(FORMATS, (1.0, 0.4, 0.01, 0.0), strict=True)
}


@dataclass(frozen=True)
class Search:
    path: tuple[PathPoint, ...] = recipe_path(SHAPES, SCORES, FORMATS)
    num_weights: int = sum(rows * columns for rows, columns in SHAPES.values())

    def within_bits(self, bits: float) -> PathPoint:
        return within_bits(self.path, SHAPES, SCORES, bits)


def engine_bytes(recipe: FormatRecipe) -> int:
    """With scales of 32 bits, bf16 in 12, and other weights besides."""
    bits = {"int4_g128": 4.25, "iq4_g16": 4.5, "int8": 8.2, "bf16": 12.0}
    weights = sum(
        rows * columns * bits[recipe.names[site_of(name)]]
        for name, (rows, columns) in SHAPES.items()
    )
    return 77_777 + int(weights / 8)


def found(**budget: float) -> PathPoint:
    given = Budget(**budget)  # type: ignore[arg-type]
    return within_size(Search(), given, engine_bytes, lambda step: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.37, 0.5, 0.73, 0.9, 1.0])
def test_the_best_engine_of_a_size_is_found(share: float) -> None:
    path = Search().path
    least, most = engine_bytes(path[0].recipe), engine_bytes(path[-1].recipe)
    max_bytes = int(least + share * (most - least))
    point = found(max_bytes=max_bytes)
    assert engine_bytes(point.recipe) <= max_bytes
    fitting = [one for one in path if engine_bytes(one.recipe) <= max_bytes]
    assert point.predicted <= fitting[-1].predicted


def test_bits_and_bytes_hold_together() -> None:
    most = engine_bytes(Search().path[-1].recipe)
    assert found(max_bytes=most, max_bits=4.5).bits <= 4.5
    assert found(max_bits=6.0).predicted == Search().within_bits(6.0).predicted


def test_budgets_that_nothing_fits_are_refused_with_the_least() -> None:
    least = engine_bytes(Search().path[0].recipe)
    with pytest.raises(AccuracyError, match=rf"--max-bytes: .*{least:,} bytes.*Give {least}"):
        found(max_bytes=least - 1)
    with pytest.raises(AccuracyError, match=r"--max-bits: .*4\.125"):
        found(max_bits=4.0)
