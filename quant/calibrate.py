"""Quantisation of a checkpoint into one that other engines load, too."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtc.protos.errors import UnsupportedError
from trtc.protos.kv import KvDType
from trtc.protos.progress import Progress, Step
from trtc.quant.calibration import CalibrationJob, Calibrator
from trtc.quant.calibration_facts import CalibrationFacts
from trtc.quant.calibration_inputs import calibration_set, journals_below, opened
from trtc.quant.calibration_mixture import Mixture, read_calibration
from trtc.quant.calibration_text import (
    TOKENIZER_FILE,
    WINDOW,
    TokenSet,
)
from trtc.quant.device import Placement, on_best_device, peak_bytes
from trtc.quant.evaluation import heldout_set, part_of
from trtc.quant.recipe import RECIPE_FILE, FormatRecipe
from trtc.quant.scheme import BUILDABLE, MIXED, SCHEMES, Gptq, Nearest, Scheme
from trtc.quant.site_format import BF16, FP8, INT8, SiteFormat, grouped

if TYPE_CHECKING:
    from trtc.quant.layer_source import LayerSource

_COPIED_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
)


def quantize_checkpoint(
    model_dir: Path,
    scheme: Scheme | FormatRecipe,
    kv_dtype: KvDType,
    calibration: str | Path | None,
    output_dir: Path,
    progress: Progress,
    heldout: TokenSet | None = None,
    keep: Sequence[str] = (),
    journal: Path | None = None,
) -> CalibrationFacts:
    """Write `model_dir`, quantised by `scheme`, as a Hugging Face checkpoint.

    The same inputs give the same bytes. The lm_head, embeddings, norms and routers stay bf16.

    Args:
        scheme: one with a calibration; or a recipe, a copy of which is written beside.
        kv_dtype: f8e4m3 adds scales for an FP8 KV cache.
        calibration: .jsonl or text, or several with shares (quant/calibration_mixture.py); None for
            the text that ships with trtc.
        output_dir: made if absent; its files are overwritten.
        heldout: tokens to measure the layers on, of which a part is taken; None: of the text that
            ships with trtc.
        keep: globs of linears that stay bf16; for schemes.
        journal: where layers that are done are kept, and those of a run that was killed are found
            (quant/journal.py); None: nowhere.

    Raises:
        RequestError: a glob of `keep` that names no linear; a recipe of another model.
        UnsupportedError: a model that the scheme cannot quantise, with the linear's name.
        CalibrationError: text that is too small or unreadable.
        CheckpointError: a damaged checkpoint.
    """
    if isinstance(scheme, Scheme) and scheme.calibration is None:
        calibrated = [name for name in BUILDABLE if SCHEMES[name].calibration is not None]
        raise UnsupportedError(
            f"{scheme.name} has nothing to calibrate",
            field="--dtype",
            remedy=f"Use one of {', '.join(calibrated)}",
        )
    # Read before any work, so that a bad file costs no time; torch and modelopt cost seconds.
    texts = read_calibration(calibration)
    plan = _planned(model_dir, scheme, kv_dtype, keep)
    progress(Step("opening the checkpoint"))
    source = opened(model_dir, "bfloat16", texts, heldout)
    work = plan.calibrator.work_bytes(model_dir)
    if work:
        needed = peak_bytes(source, work) / 1e9
        progress(Step(f"calibrating, which takes about {needed:.1f} GB of memory"))
    with on_best_device(source, work) as placement:
        return _quantize(
            source,
            model_dir,
            plan,
            texts,
            output_dir,
            progress,
            heldout,
            placement,
            journal,
        )


@dataclass(frozen=True)
class _Plan:
    """A calibration that fits the model."""

    name: str
    """Of the scheme."""
    calibrator: Calibrator
    kept: tuple[str, ...] = ()
    recipe: FormatRecipe | None = None


def _planned(
    model_dir: Path, scheme: Scheme | FormatRecipe, kv_dtype: str, keep: Sequence[str]
) -> _Plan:
    from trtc.quant.linears import check_quantizable, linear_shapes

    shapes = linear_shapes(model_dir)
    if isinstance(scheme, FormatRecipe):
        calibration = scheme.scheme.calibration
        assert isinstance(calibration, Gptq)
        by_linear = scheme.of_linears(shapes)
        return _Plan(MIXED, _gptq(calibration, kv_dtype, by_linear), recipe=scheme)
    kept = check_quantizable(shapes, scheme, keep)
    if isinstance(scheme.calibration, Gptq):
        assert scheme.group_size is not None
        all_alike = grouped(scheme.weight, scheme.group_size)
        formats = {name: BF16 if name in kept else all_alike for name in shapes}
        return _Plan(scheme.name, _gptq(scheme.calibration, kv_dtype, formats), kept)
    if isinstance(scheme.calibration, Nearest):
        all_alike = INT8 if scheme.weight == "i8" else FP8
        formats = {name: BF16 if name in kept else all_alike for name in shapes}
        return _Plan(scheme.name, _nearest(kv_dtype, formats, scheme.hadamard), kept)
    return _Plan(scheme.name, _modelopt(scheme, kv_dtype, kept), kept)


def _modelopt(scheme: Scheme, kv_dtype: str, kept: tuple[str, ...]) -> Calibrator:
    from trtc.quant.modelopt_ptq import ModeloptCalibrator

    return ModeloptCalibrator(scheme, kv_dtype, kept)


def _gptq(settings: Gptq, kv_dtype: str, formats: Mapping[str, SiteFormat]) -> Calibrator:
    from trtc.quant.gptq_calibrator import GptqCalibrator

    return GptqCalibrator(settings, kv_dtype, formats)


def _nearest(kv_dtype: str, formats: Mapping[str, SiteFormat], hadamard: int) -> Calibrator:
    from trtc.quant.nearest_calibrator import NearestCalibrator

    return NearestCalibrator(kv_dtype, formats, hadamard)


def _quantize(
    source: "LayerSource",
    model_dir: Path,
    plan: _Plan,
    texts: Mixture,
    output_dir: Path,
    progress: Progress,
    heldout: TokenSet | None,
    placement: Placement,
    journal: Path | None,
) -> CalibrationFacts:
    from trtc.quant.experts import separate_experts
    from trtc.quant.linears import mark_starved

    model = source.model
    facts = model.config.get_text_config()
    window = min(WINDOW, facts.max_position_embeddings)
    tokens = calibration_set(model, model_dir, texts, window, plan.calibrator.max_tokens)
    heldout = heldout or heldout_set(model_dir, facts.vocab_size, window, model=model)
    starved = mark_starved(source, separate_experts(model), tokens)
    output_dir.mkdir(parents=True, exist_ok=True)
    phase = f"calibrating {plan.name} on {tokens.num_tokens} tokens, {placement}"
    part = part_of(heldout)
    own = None if journal is None else journal / "calibration"
    journals = journals_below(own, model, model_dir, (tokens, part), placement)
    job = CalibrationJob(source, model_dir, output_dir, tokens, part, phase, progress, journals)
    layers = plan.calibrator.run(job)
    _copy_files(model_dir, output_dir)
    if plan.recipe is not None:
        (output_dir / RECIPE_FILE).write_bytes(plan.recipe.to_json())
    return CalibrationFacts(
        tokens.source,
        tokens.sha256,
        tokens.num_tokens,
        layers,
        starved,
        placement.name,
        plan.kept,
        {} if plan.recipe is None else plan.recipe.names,
    )


def _copy_files(model_dir: Path, output_dir: Path) -> None:
    """Tokenizer and generation settings, as they were."""
    (output_dir / "generation_config.json").unlink(missing_ok=True)
    for name in _COPIED_FILES:
        if (model_dir / name).is_file():
            (output_dir / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(model_dir / name, output_dir / name)
