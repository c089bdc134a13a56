"""The build's own verdict on an engine: accuracy on held-out text, and canary prompts."""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trtc.builder.probe import EngineProbe, Float32s, Int32s
from trtc.protos.errors import AccuracyError
from trtc.protos.manifest import AccuracyFacts, Canary, LayerError
from trtc.quant.accuracy import measure
from trtc.quant.calibration_text import TokenSet
from trtc.quant.reference_model import reference_logits

_MAX_LOGITS_BYTES = 128 << 20
_MIN_WINDOW = 128
_CANARY_LENGTHS = (5, 17, 40)
"""Within a page, over a page's border, and over several."""
_CANARY_TOKENS = 16
_CANARY_MARGIN = 0.3
"""Logits by which a canary's token must lead: another instruction set rounds differently, and a
healthy engine must give the same tokens there."""


def judge_accuracy(
    probe: EngineProbe,
    engine: Path,
    texts: TokenSet,
    reference: Path | None,
    layers: tuple[LayerError, ...],
    measured_on: str,
    scratch: Path,
) -> AccuracyFacts:
    """Measure an engine against its unquantised checkpoint.

    The reference runs first and its logits wait on disk, so that the two models are never in
    memory together.

    Args:
        engine: may still be under construction, with a provisional manifest.
        reference: the unquantised checkpoint; None: perplexity only.

    Raises:
        AccuracyError: logits that are not finite.
    """
    sequences = texts.sequences
    if reference is None:
        accuracy = measure(probe.logits(engine, sequences), None, sequences)
        return accuracy.facts(texts.sha256, measured_on, layers)
    with tempfile.TemporaryFile(dir=scratch) as file:
        spooled = [_spool(file, logits) for logits in reference_logits(reference, sequences)]
        theirs = (rows.read() for rows in spooled)
        accuracy = measure(probe.logits(engine, sequences), theirs, sequences)
    return accuracy.facts(texts.sha256, measured_on, layers)


def window_tokens(vocab_size: int, max_seq_len: int) -> int:
    """How long a held-out sequence may be, so that its logits stay small beside a model."""
    return min(max_seq_len, max(_MIN_WINDOW, _MAX_LOGITS_BYTES // (4 * vocab_size)))


@dataclass(frozen=True)
class _Spooled:
    """One sequence's logits in a file."""

    file: BinaryIO
    offset: int
    shape: tuple[int, int]

    def read(self) -> Float32s:
        self.file.seek(self.offset)
        rows, columns = self.shape
        return np.fromfile(self.file, np.float32, rows * columns).reshape(rows, columns)


def _spool(file: BinaryIO, logits: Float32s) -> _Spooled:
    offset = file.tell()
    file.write(np.ascontiguousarray(logits, np.float32).data)
    file.flush()
    rows, columns = logits.shape
    return _Spooled(file, offset, (rows, columns))


def check_budget(accuracy: AccuracyFacts, max_kl: float | None) -> None:
    """Hold an engine to `--max-kl`.

    Raises:
        AccuracyError: it is further from the unquantised model.
    """
    if max_kl is None:
        return
    assert accuracy.kl is not None
    if accuracy.kl > max_kl:
        worst = min(accuracy.layers, key=lambda layer: layer.sqnr_db, default=None)
        hint = f"; {worst.layer} lost most ({worst.sqnr_db:.1f} dB)" if worst else ""
        raise AccuracyError(
            f"the engine is {accuracy.kl:.4f} nats a token from the unquantised model, more than "
            f"{max_kl}{hint}",
            field="--max-kl",
            remedy="Use another --dtype, better --calib text or a larger budget; nothing was left",
        )


def make_canaries(
    probe: EngineProbe, engine: Path, texts: Iterable[Int32s], max_seq_len: int
) -> tuple[Canary, ...]:
    """Prompts and the greedy tokens that a healthy engine gives for them on any machine."""
    canaries = []
    for length, text in zip(_CANARY_LENGTHS, texts, strict=False):
        prompt = [int(token) for token in text[: min(length, max_seq_len - 1)]]
        tokens = probe.greedy(engine, prompt, min(_CANARY_TOKENS, max_seq_len - len(prompt)))
        sure = tokens[: _sure_tokens(probe, engine, prompt, tokens)]
        if sure:
            canaries.append(Canary(prompt_ids=tuple(prompt), token_ids=sure))
    return tuple(canaries)


def _sure_tokens(
    probe: EngineProbe, engine: Path, prompt: Sequence[int], tokens: Sequence[int]
) -> int:
    """How many leading tokens led by the margin."""
    sequence = np.array([*prompt, *tokens[:-1]], np.int32)
    logits = next(iter(probe.logits(engine, [sequence])))[len(prompt) - 1 :]
    best = np.sort(logits, axis=1)[:, -2:]
    sure = best[:, 1] - best[:, 0] >= _CANARY_MARGIN
    return len(tokens) if bool(sure.all()) else int(np.argmin(sure))
