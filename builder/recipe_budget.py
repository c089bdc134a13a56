"""Recipes within a budget: which ones a build tries, in which order."""

from pathlib import Path

from trtc.protos.errors import AccuracyError
from trtc.protos.progress import Progress, Step
from trtc.quant.calibrate import recipe_search
from trtc.quant.calibration_text import TokenSet
from trtc.quant.recipe import FormatRecipe

_SHARES = (1.0, 0.8, 0.6, 0.4)
"""Of `max_kl` that recipes may take, one after the other: the search measures weights alone, and an
engine may round activations and the lm_head too."""


def find_recipes(
    model_dir: Path,
    calibration: Path | None,
    heldout: TokenSet | None,
    *,
    max_bits: float | None,
    max_kl: float | None,
    progress: Progress,
) -> tuple[FormatRecipe | None, ...]:
    """The recipes to build until one fits, from narrow to wide; None is the unquantised model.

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
            return (point.recipe if point.recipe.is_quantized else None,)
        assert max_kl is not None
        found: list[FormatRecipe | None] = []
        for share in _SHARES:
            progress(Step(f"finding a recipe within {share * max_kl:.4f} nats a token"))
            fitting = search.within_kl(share * max_kl)
            if fitting is not None and fitting.recipe not in found:
                found.append(fitting.recipe)
        return (*found, None)
