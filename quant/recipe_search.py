"""Finds recipes: sites in every format, what each costs, and what whole recipes cost."""

from collections.abc import Sequence
from typing import Any

from trtc.quant.calibration import CalibrationJob
from trtc.quant.calibration_text import MIN_EVAL_TOKENS
from trtc.quant.evaluation import part_of
from trtc.quant.linears import quantizable_linears
from trtc.quant.recipe import FormatRecipe
from trtc.quant.recipe_divergence import Divergence, RecipeMeter
from trtc.quant.recipe_path import PathPoint, Shapes, recipe_path, within_bits
from trtc.quant.rounded_sites import SEARCHED, round_sites
from trtc.quant.scheme import Gptq
from trtc.quant.site_format import BF16, EMBEDDING, LM_HEAD
from trtc.quant.site_scores import find_scores

_F64 = 8
_MAX_KEPT_BYTES = 2 << 30
"""Of the unquantised model's log-probabilities; of more held-out text, a part is measured on."""
_DRAWN = 10
"""Parts of the path whose ends are measured for its picture, and before others."""
MOST_MODELS = _DRAWN + 3
"""That are measured at once: at the ends of these, the chosen one, and the unquantised one."""


class RecipeSearch:
    """Scores and divergences of a model's sites and formats.

    In memory is a decoder layer at a time, in all formats; on disk, the whole model in those that
    GPTQ rounds to.

    Args:
        job: its model is in f32 or bf16, and it has journals.
        tables: sites of tables that get a format as well (quant/site_format.py's TABLES).
    """

    def __init__(self, job: CalibrationJob, settings: Gptq, tables: Sequence[str] = ()) -> None:
        of_tables = {site: one for site, one in _tables(job.model).items() if site in tables}
        modules = {**dict(quantizable_linears(job.model)), **of_tables}
        self.shapes: Shapes = {
            name: (module.weight.shape[0], module.weight.shape[1])
            for name, module in modules.items()
        }
        rounded = round_sites(job, modules, settings)
        self.scores = find_scores(job, of_tables, rounded, settings)
        self.path = recipe_path(self.shapes, self.scores, SEARCHED)
        vocab_size: int = job.model.config.get_text_config().vocab_size
        texts = part_of(job.heldout, most_tokens(vocab_size)).sequences
        self._meter = RecipeMeter(job.source, texts, of_tables, rounded, job.progress)
        self._measured: dict[float, tuple[PathPoint, Divergence]] = {}
        """By bits."""

    @property
    def num_weights(self) -> int:
        """Of all sites."""
        return sum(rows * columns for rows, columns in self.shapes.values())

    def within_bits(self, bits: float) -> PathPoint:
        """The recipe for a number of bits a weight."""
        return within_bits(self.path, self.shapes, self.scores, bits)

    def within_kl(self, kl: float) -> PathPoint | None:
        """The narrowest recipe of the path whose measured divergence, with one standard error more,
        is at most `kl`; None: not even the widest that quantises something."""
        self._measure(self._drawn())
        last = len(self.path) - 1
        if all(name == BF16.name for name in self.path[last].recipe.names.values()):
            last -= 1
        low, high = 0, last + 1
        while low < high:
            middle = self._between(low, high)
            self._measure([self.path[middle]])
            _, found = self._measured[self.path[middle].bits]
            if found.mean + found.error <= kl:
                high = middle
            else:
                low = middle + 1
        return self.path[low] if low <= last else None

    def frontier(self, chosen: PathPoint) -> tuple[tuple[PathPoint, Divergence], ...]:
        """A recipe, others along the path and those that were measured before, from narrow to wide,
        with their divergences. Of two with the same bits, the chosen one."""
        self._measure([*self._drawn(), chosen])
        return tuple(found for _, found in sorted(self._measured.items(), key=lambda item: item[0]))

    def measure(self, recipe: FormatRecipe) -> Divergence:
        """The divergence of a recipe on held-out text, each linear as it was rounded among others
        of its format."""
        (found,) = self._meter.measure([recipe])
        return found

    def _measure(self, points: Sequence[PathPoint]) -> None:
        """In one pass over the layers, of which a large checkpoint is read once."""
        wanted = [
            point
            for point in points
            if point.bits not in self._measured or self._measured[point.bits][0] != point
        ]
        found = self._meter.measure([point.recipe for point in wanted])
        for point, divergence in zip(wanted, found, strict=True):
            self._measured[point.bits] = (point, divergence)

    def _drawn(self) -> list[PathPoint]:
        last = len(self.path) - 1
        places = {round(number * last / _DRAWN) for number in range(_DRAWN + 1)}
        return [self.path[place] for place in sorted(places)]

    def _between(self, low: int, high: int) -> int:
        """The middle of a part of the path, or the place nearest to it that is measured there."""
        middle = (low + high) // 2
        measured = [at for at in range(low, high) if self.path[at].bits in self._measured]
        return min(measured, key=lambda at: abs(at - middle), default=middle)


def most_tokens(vocab_size: int) -> int:
    """Of held-out text that recipes are measured on: their log-probabilities are kept."""
    return max(MIN_EVAL_TOKENS, _MAX_KEPT_BYTES // (_F64 * vocab_size))


def _tables(model: Any) -> dict[str, Any]:
    """The modules of a model's tables, by site: the lm_head where one table is both."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        return {EMBEDDING: head}
    return {LM_HEAD: head, EMBEDDING: embedding}
