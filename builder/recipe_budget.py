"""Recipes for a budget of bits, bytes or divergence, in the order in which a build tries them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtc.builder.engine_size import Bytes
from trtc.builder.report_frontier import FrontierPoint
from trtc.protos.errors import AccuracyError
from trtc.protos.progress import Progress, Step
from trtc.quant.calibration_text import TokenSet
from trtc.quant.recipe import FormatRecipe
from trtc.quant.recipe_path import PathPoint, recipe_path

if TYPE_CHECKING:
    from trtc.quant.recipe_search import RecipeSearch

_SHARES = (1.0, 0.8, 0.6, 0.4)
"""Of `max_kl` that recipes may take, one after the other: the search measures weights alone, and an
engine may round activations and the lm_head too."""
_FILLED = (1.0, 0.75, 0.5)
"""Shares of spare bytes that are tried for a recipe beside the path."""


@dataclass(frozen=True)
class Budget:
    """What a build was given; one of the three at least."""

    max_bits: float | None = None
    max_bytes: int | None = None
    """Of the engine's weights."""
    max_kl: float | None = None

    @property
    def is_size(self) -> bool:
        return self.max_bits is not None or self.max_bytes is not None


@dataclass(frozen=True)
class FoundRecipe:
    """A recipe to build, among others that were measured."""

    recipe: FormatRecipe
    """It may leave all as it is."""
    frontier: tuple[FrontierPoint, ...]
    """From narrow to wide, this one among them."""


def find_recipes(
    model_dir: Path,
    calibration: str | Path | None,
    heldout: TokenSet | None,
    budget: Budget,
    bytes_of: Bytes,
    tables: tuple[str, ...],
    journal: Path | None,
    progress: Progress,
) -> tuple[FoundRecipe, ...]:
    """The recipes to build until one fits, from narrow to wide, the unquantised model the last.

    With a budget of size there is one, the best of that size.

    Args:
        calibration: as of `quantize_checkpoint`.
        heldout: what divergences are measured on.
        bytes_of: asked where the budget is of bytes.
        tables: sites of tables that get a format as well.
        journal: as of `quantize_checkpoint`.

    Raises:
        AccuracyError: no recipe is as small as the budget.
    """
    from trtc.quant.checkpoint_search import recipe_search

    with recipe_search(model_dir, calibration, heldout, progress, tables, journal) as search:
        if budget.is_size:
            point = within_size(search, budget, bytes_of, progress)
            progress(Step(f"found a recipe of {point.bits:.3f} bits a weight"))
            return (_found(search, point),)
        max_kl = budget.max_kl
        assert max_kl is not None
        points: list[PathPoint] = []
        for share in _SHARES:
            progress(Step(f"finding a recipe within {share * max_kl:.4f} nats a token"))
            fitting = search.within_kl(share * max_kl)
            if fitting is not None and fitting not in points:
                points.append(fitting)
        return tuple(_found(search, point) for point in (*points, search.path[-1]))


def narrowest_recipe(model_dir: Path, tables: tuple[str, ...]) -> FormatRecipe:
    """The smallest recipe that a search may find; no weights are read.

    Raises:
        UnsupportedError: Transformers has no such model.
    """
    from trtc.quant.linears import linear_shapes, table_shape
    from trtc.quant.rounded_sites import SEARCHED

    of_tables = dict.fromkeys(tables, table_shape(model_dir))
    return recipe_path({**linear_shapes(model_dir), **of_tables}, {}, SEARCHED)[0].recipe


def within_size(
    search: "RecipeSearch", budget: Budget, bytes_of: Bytes, progress: Progress
) -> PathPoint:
    """The best recipe of a size."""
    most = float("inf") if budget.max_bits is None else budget.max_bits
    if search.path[0].bits > most:
        raise AccuracyError(
            f"the smallest recipe takes {search.path[0].bits:.3f} bits a weight",
            field="--max-bits",
            remedy=f"Give {search.path[0].bits:.3f} or more",
        )
    if budget.max_bytes is None:
        return search.within_bits(most)
    progress(Step("sizing engines"))
    return _within_bytes(search, budget.max_bytes, most, bytes_of)


def _within_bytes(
    search: "RecipeSearch", max_bytes: int, max_bits: float, bytes_of: Bytes
) -> PathPoint:
    """The best recipe that takes at most `max_bits` a weight, and whose engine `max_bytes`.

    Engines store formats in more or fewer bits than checkpoints do, and other weights besides: the
    path is bisected by the sizes of engines, and what is spare then is filled.
    """
    least = bytes_of(search.path[0].recipe)
    if least > max_bytes:
        raise AccuracyError(
            f"the weights of the smallest engine take {least:,} bytes",
            field="--max-bytes",
            remedy=f"Give {least} or more",
        )
    low, high, taken = 0, len(search.path), least
    while high - low > 1:
        middle = (low + high) // 2
        size = bytes_of(search.path[middle].recipe)
        if search.path[middle].bits <= max_bits and size <= max_bytes:
            low, taken = middle, size
        else:
            high = middle
    best, spare = search.path[low], 8 * (max_bytes - taken) / search.num_weights
    for share in _FILLED:
        point = search.within_bits(min(max_bits, best.bits + share * spare))
        if bytes_of(point.recipe) <= max_bytes and point.predicted <= best.predicted:
            return point
    return best


def _found(search: "RecipeSearch", chosen: PathPoint) -> FoundRecipe:
    points = tuple(
        FrontierPoint(
            bits=point.bits, kl=max(kl.mean, 0.0), kl_error=kl.error, chosen=point == chosen
        )
        for point, kl in search.frontier(chosen)
    )
    return FoundRecipe(chosen.recipe, points)
