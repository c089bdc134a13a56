"""Recipes for a budget of bits or divergence, in the order in which a build tries them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtc.builder.report_frontier import FrontierPoint
from trtc.protos.errors import AccuracyError
from trtc.protos.progress import Progress, Step
from trtc.quant.calibrate import recipe_search
from trtc.quant.calibration_text import TokenSet
from trtc.quant.recipe import FormatRecipe
from trtc.quant.recipe_path import PathPoint

if TYPE_CHECKING:
    from trtc.quant.recipe_search import RecipeSearch

_SHARES = (1.0, 0.8, 0.6, 0.4)
"""Of `max_kl` that recipes may take, one after the other: the search measures weights alone, and an
engine may round activations and the lm_head too."""


@dataclass(frozen=True)
class FoundRecipe:
    """A recipe to build, among others that were measured."""

    recipe: FormatRecipe | None
    """None is the unquantised model."""
    frontier: tuple[FrontierPoint, ...]
    """From narrow to wide, this one among them."""


def find_recipes(
    model_dir: Path,
    calibration: Path | None,
    heldout: TokenSet | None,
    *,
    max_bits: float | None,
    max_kl: float | None,
    progress: Progress,
) -> tuple[FoundRecipe, ...]:
    """The recipes to build until one fits, from narrow to wide, the unquantised model the last.

    With `max_bits` there is one, the best of that size.

    Args:
        calibration: as of `quantize_checkpoint`.
        heldout: what divergences are measured on.

    Raises:
        AccuracyError: no recipe is as small as `max_bits`.
    """
    with recipe_search(model_dir, calibration, heldout, progress) as search:
        if max_bits is not None:
            point = search.within_bits(max_bits)
            if point.bits > max_bits:
                raise AccuracyError(
                    f"the smallest recipe takes {point.bits:.3f} bits a weight",
                    field="--max-bits",
                    remedy=f"Give {point.bits:.3f} or more",
                )
            progress(Step(f"found a recipe of {point.bits:.3f} bits a weight"))
            return (_found(search, point),)
        assert max_kl is not None
        points: list[PathPoint] = []
        for share in _SHARES:
            progress(Step(f"finding a recipe within {share * max_kl:.4f} nats a token"))
            fitting = search.within_kl(share * max_kl)
            if fitting is not None and fitting not in points:
                points.append(fitting)
        return tuple(_found(search, point) for point in (*points, search.path[-1]))


def _found(search: "RecipeSearch", chosen: PathPoint) -> FoundRecipe:
    measured = {point.bits: found for point, found in search.frontier()}
    measured[chosen.bits] = search.measure(chosen.recipe)
    points = tuple(
        FrontierPoint(
            bits=bits, kl=max(kl.mean, 0.0), kl_error=kl.error, chosen=bits == chosen.bits
        )
        for bits, kl in sorted(measured.items(), key=lambda item: item[0])
    )
    return FoundRecipe(chosen.recipe if chosen.recipe.is_quantized else None, points)
