"""Quantise a checkpoint into one that other engines read too."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtc.protos.errors import UnsupportedError
from trtc.protos.manifest import LayerError
from trtc.protos.progress import Progress, Step
from trtc.quant.calibration import CalibrationJob, Calibrator
from trtc.quant.calibration_text import (
    MIN_TOKENS,
    TOKENIZER_FILE,
    WINDOW,
    Texts,
    TokenSet,
    default_calibration,
    read_texts,
    tokenize,
)
from trtc.quant.device import Placement, on_best_device
from trtc.quant.evaluation import SELF_SAMPLE_LENGTH, heldout_set, part_of
from trtc.quant.reference_model import load_model, sample_sequences
from trtc.quant.scheme import BUILDABLE, SCHEMES, Gptq, Modelopt, Scheme

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
_CALIBRATION_SEED = 1


@dataclass(frozen=True)
class CalibrationFacts:
    """What a quantisation was based on and what it cost."""

    source: str
    """Name of the text's file, `default`, or `model` when the model wrote it itself."""
    sha256: str
    tokens: int
    layers: tuple[LayerError, ...]
    """On held-out text, in the order of the model."""
    starved_experts: tuple[str, ...] = ()
    """Experts that calibration text hardly reached, calibrated on all tokens of their layer."""
    device: str = "CPU"
    """What computed: `CPU`, or the GPU's name. Their rounding differs."""
    kept: tuple[str, ...] = ()
    """Linears that were left unquantised because `keep` names them, or one that must be alike."""


def quantize_checkpoint(
    model_dir: Path,
    scheme: Scheme,
    kv_dtype: Literal["f32", "bf16", "f8e4m3"],
    calibration: Path | None,
    output_dir: Path,
    progress: Progress,
    heldout: TokenSet | None = None,
    keep: Sequence[str] = (),
) -> CalibrationFacts:
    """Write `model_dir`, quantised by `scheme`, as a Hugging Face checkpoint.

    The same inputs give the same bytes. The lm_head, embeddings, norms and routers stay bf16.

    Args:
        scheme: one with a calibration.
        kv_dtype: f8e4m3 adds scales for an FP8 KV cache.
        calibration: .jsonl or text; None for the text that ships with trtc.
        output_dir: made if absent; its files are overwritten.
        heldout: tokens to measure the layers on, of which a part is taken; None: of the text that
            ships with trtc.
        keep: globs of linears that stay bf16.

    Raises:
        RequestError: a glob of `keep` that names no linear.
        UnsupportedError: a model that the scheme cannot quantise, with the linear's name.
        CalibrationError: text that is too small or unreadable.
        CheckpointError: a damaged checkpoint.
    """
    if scheme.calibration is None:
        calibrated = [name for name in BUILDABLE if SCHEMES[name].calibration is not None]
        raise UnsupportedError(
            f"{scheme.name} has nothing to calibrate",
            field="--dtype",
            remedy=f"Use one of {', '.join(calibrated)}",
        )
    # Read before any work, so that a bad file costs no time; torch and modelopt cost seconds.
    texts = default_calibration() if calibration is None else read_texts(calibration)
    from trtc.quant.linears import check_quantizable

    kept = check_quantizable(model_dir, scheme, keep)
    calibrator = _CALIBRATORS[type(scheme.calibration)](scheme, kv_dtype, kept)
    progress(Step("loading the checkpoint"))
    model = load_model(model_dir, "bfloat16")
    with on_best_device(model) as placement:
        return _quantize(
            model,
            model_dir,
            calibrator,
            scheme.name,
            texts,
            output_dir,
            progress,
            heldout,
            placement,
            kept,
        )


def _modelopt(scheme: Scheme, kv_dtype: str, kept: tuple[str, ...]) -> Calibrator:
    from trtc.quant.modelopt_ptq import ModeloptCalibrator

    return ModeloptCalibrator(scheme, kv_dtype, kept)


def _gptq(scheme: Scheme, kv_dtype: str, kept: tuple[str, ...]) -> Calibrator:
    from trtc.quant.gptq_calibrator import GptqCalibrator

    return GptqCalibrator(scheme, kv_dtype, kept)


_CALIBRATORS: Mapping[type[Any], Callable[[Scheme, str, tuple[str, ...]], Calibrator]] = {
    Modelopt: _modelopt,
    Gptq: _gptq,
}
"""By the record of the algorithm. The arguments: scheme, KV type, linears that stay unquantised."""


def _quantize(
    model: Any,
    model_dir: Path,
    calibrator: Calibrator,
    name: str,
    texts: Texts,
    output_dir: Path,
    progress: Progress,
    heldout: TokenSet | None,
    placement: Placement,
    kept: tuple[str, ...],
) -> CalibrationFacts:
    from trtc.quant.experts import separate_experts
    from trtc.quant.linears import mark_starved

    facts = model.config.get_text_config()
    window = min(WINDOW, facts.max_position_embeddings)
    tokens = _calibration_set(model, model_dir, texts, window, calibrator.max_tokens)
    heldout = heldout or heldout_set(model_dir, facts.vocab_size, window, model=model)
    starved = mark_starved(model, separate_experts(model), tokens)
    output_dir.mkdir(parents=True, exist_ok=True)
    phase = f"calibrating {name} on {tokens.num_tokens} tokens, {placement}"
    job = CalibrationJob(model, model_dir, output_dir, tokens, part_of(heldout), phase, progress)
    layers = calibrator.run(job)
    _copy_files(model_dir, output_dir)
    return CalibrationFacts(
        tokens.source, tokens.sha256, tokens.num_tokens, layers, starved, placement.name, kept
    )


def _calibration_set(
    model: Any, model_dir: Path, texts: Texts, window: int, max_tokens: int
) -> TokenSet:
    if texts.source == "default" and not (model_dir / TOKENIZER_FILE).is_file():
        length = min(window, SELF_SAMPLE_LENGTH)
        count = 2 * MIN_TOKENS // length
        return sample_sequences(model, count=count, length=length, seed=_CALIBRATION_SEED)
    return tokenize(
        texts,
        model_dir,
        model.config.get_text_config().vocab_size,
        window=window,
        max_tokens=max_tokens,
        min_tokens=MIN_TOKENS,
    )


def _copy_files(model_dir: Path, output_dir: Path) -> None:
    """Tokenizer and generation settings, as they were."""
    (output_dir / "generation_config.json").unlink(missing_ok=True)
    for name in _COPIED_FILES:
        if (model_dir / name).is_file():
            (output_dir / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(model_dir / name, output_dir / name)
