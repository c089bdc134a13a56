"""A search for recipes of a checkpoint, within the memory of a decoder layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from trtc.protos.progress import Progress, Step
from trtc.quant.calibration import CalibrationJob
from trtc.quant.calibration_inputs import calibration_set, journals_below, opened
from trtc.quant.calibration_mixture import Mixture, read_calibration
from trtc.quant.calibration_text import WINDOW, TokenSet
from trtc.quant.device import on_best_device, peak_bytes
from trtc.quant.evaluation import heldout_set
from trtc.quant.journal import Journals
from trtc.quant.reference_model import reference_dtype
from trtc.quant.scheme import Gptq

if TYPE_CHECKING:
    from trtc.quant.layer_source import LayerSource
    from trtc.quant.recipe_search import RecipeSearch

_TOKENS = 16_384
"""Of the calibration text, at most."""


@contextmanager
def recipe_search(
    model_dir: Path,
    calibration: str | Path | None,
    heldout: TokenSet | None,
    progress: Progress,
    tables: Sequence[str] = (),
    journal: Path | None = None,
) -> Iterator["RecipeSearch"]:
    """A search for recipes of a checkpoint, of which a decoder layer at a time is in memory.

    The same inputs give the same recipes.

    Args:
        calibration: as of `quantize_checkpoint`.
        heldout: what divergences are measured on; None: text that ships with trtc, or what the
            model writes.
        tables: sites of tables that get a format as well, LM_HEAD or EMBEDDING.
        journal: as of `quantize_checkpoint`; None: rounded weights are in a temporary directory.

    Raises:
        CalibrationError: text that is too small or unreadable.
        CheckpointError: a damaged checkpoint.
        EnvironmentFault: the disk has no room for the rounded weights.
    """
    texts = read_calibration(calibration)
    from trtc.quant.recipe_search import RecipeSearch
    from trtc.quant.search_size import check_room, search_size

    size = search_size(model_dir, tables, _TOKENS)
    with _store(journal) as directory:
        check_room(directory, size)
        progress(Step("opening the checkpoint to find its recipe"))
        source = opened(model_dir, reference_dtype(model_dir), texts, heldout)
        memory, disk = peak_bytes(source, size.memory, size.others) / 1e9, size.disk / 1e9
        progress(Step(f"searching takes about {memory:.1f} GB of memory and {disk:.1f} GB of disk"))
        with on_best_device(source, size.memory, size.others) as placement:
            tokens, measured = _texts(source, model_dir, texts, heldout)
            own = None if journal is None else directory
            inputs = (tokens, measured)
            journals = journals_below(own, source.model, model_dir, inputs, placement)
            journals = journals or Journals(directory, resumes=False)
            job = CalibrationJob(
                source, model_dir, model_dir, tokens, measured, "", progress, journals
            )
            yield RecipeSearch(job, Gptq(asymmetric=True), tables)


def _texts(
    source: "LayerSource", model_dir: Path, texts: Mixture, heldout: TokenSet | None
) -> tuple[TokenSet, TokenSet]:
    """To calibrate and to measure on; experts are marked that the first hardly reaches."""
    from trtc.quant.experts import separate_experts
    from trtc.quant.linears import mark_starved

    facts = source.model.config.get_text_config()
    window = min(WINDOW, facts.max_position_embeddings)
    tokens = calibration_set(source.model, model_dir, texts, window, _TOKENS)
    heldout = heldout or heldout_set(model_dir, facts.vocab_size, window, model=source.model)
    mark_starved(source, separate_experts(source.model), tokens)
    return tokens, heldout


@contextmanager
def _store(journal: Path | None) -> Iterator[Path]:
    """Context manager for the place of a search's files."""
    if journal is not None:
        yield journal / "search"
        return
    with TemporaryDirectory(prefix="trtc-search-") as directory:
        yield Path(directory)
