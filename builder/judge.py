"""Measures an engine during its build: accuracy on held-out text, and canary prompts."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trtc.builder.probe import EngineProbe, Float32s, Int32s
from trtc.protos.errors import AccuracyError
from trtc.protos.manifest import AccuracyFacts, Canary, LayerError
from trtc.protos.progress import Progress, counted
from trtc.quant.accuracy import measure
from trtc.quant.calibration_text import TokenSet
from trtc.quant.reference_logits import reference_logits
from trtc.quant.scheme import Scheme

_MAX_LOGITS_BYTES = 128 << 20
_MIN_WINDOW = 128
_CANARY_LENGTHS = (5, 17, 40)
"""Prompt lengths: within a page, across one page boundary, and across several."""
_CANARY_TOKENS = 16
_CANARY_MARGIN = 0.3
"""Logits by which a token of a CPU engine's canary must lead: another instruction set rounds
differently, and a healthy engine must give the same tokens there."""
_LONGEST_CANARY = 88
_SEARCHED_TEXTS, _PER_LENGTH = 8, 3
"""Texts that are searched for prompts, and prompts of each range of lengths."""
_TOLERANCES = {"f32": 0.3, "bf16": 0.3, "i8": 0.75, "f8e4m3": 1.5, "f4e2m1": 1.5, "i4": 3.0}
"""Canary tolerance in logits, by the narrowest type that activations, keys and values are rounded
to: at least twice the largest margin at which a GPU engine gave another token than its CPU twin
(docs/lab/cuda-steps.md). A value that falls to the other neighbour is off by a step of its type.
i4's is not measured but twice E4M3's: a step is an eighth of a head's largest magnitude, not of the
value."""


def judge_accuracy(
    probe: EngineProbe,
    engine: Path,
    texts: TokenSet,
    reference: Path | None,
    layers: tuple[LayerError, ...],
    measured_on: str,
    scratch: Path,
    report: Progress = lambda step: None,
) -> AccuracyFacts:
    """Measure an engine against its unquantised checkpoint.

    The reference runs first and its logits are written to disk, so that the two models are never in
    memory together.

    Args:
        engine: may still be under construction, with a provisional manifest.
        reference: the unquantised checkpoint; None: perplexity only.

    Raises:
        AccuracyError: logits that are not finite.
    """
    sequences = texts.sequences
    total = len(sequences)
    ours = counted(
        probe.logits(engine, sequences),
        f"measuring accuracy on {texts.num_tokens} held-out tokens with {measured_on}",
        total,
        "sequences",
        report,
    )
    if reference is None:
        accuracy = measure(ours, None, sequences)
        return accuracy.facts(texts, measured_on, layers)
    with tempfile.TemporaryFile(dir=scratch) as file:
        phase = "running the unquantised model on held-out text"
        logits = counted(reference_logits(reference, sequences), phase, total, "sequences", report)
        spooled = [_spool(file, rows) for rows in logits]
        theirs = (rows.read() for rows in spooled)
        accuracy = measure(ours, theirs, sequences)
    return accuracy.facts(texts, measured_on, layers)


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
    """Enforce `--max-kl`.

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


def canary_tolerance(scheme: Scheme, kv_dtype: str) -> float:
    """Logits by which a token must lead, so that rounding in another order does not change it."""
    return max(_TOLERANCES[scheme.activation], _TOLERANCES[kv_dtype])


def make_canaries(
    probe: EngineProbe,
    engine: Path,
    texts: Sequence[Int32s],
    max_seq_len: int,
    tolerance: float,
) -> tuple[Canary, ...]:
    """Prompts and the greedy tokens that a healthy engine gives for them on any machine.

    Args:
        tolerance: as `Manifest.canary_tolerance`. 0: the tokens end where one leads by little,
            because another instruction set may give another one there. Otherwise that is for the
            check to see to, and prompts are chosen whose next token leads by most.

    Returns:
        Prompts whose first token leads by the tolerance; () if there are too few of them.
    """
    if tolerance == 0:
        prompts = [
            text[: min(length, max_seq_len - 1)].tolist()
            for length, text in zip(_CANARY_LENGTHS, texts, strict=False)
        ]
        recorded = _record(probe, engine, prompts, max_seq_len)
        return tuple(_sure_part(canary) for canary in recorded if _num_sure(canary, _CANARY_MARGIN))
    prompts = _confident_prompts(probe, engine, texts, max_seq_len)
    recorded = _record(probe, engine, prompts, max_seq_len)
    sure = tuple(canary for canary in recorded if _num_sure(canary, tolerance))
    return sure if len(sure) >= len(_CANARY_LENGTHS) else ()


def _record(
    probe: EngineProbe, engine: Path, prompts: Sequence[Sequence[int]], max_seq_len: int
) -> Iterator[Canary]:
    room = max_seq_len - max(map(len, prompts), default=0)
    return probe.canaries(engine, prompts, min(_CANARY_TOKENS, room))


def _confident_prompts(
    probe: EngineProbe, engine: Path, texts: Sequence[Int32s], max_seq_len: int
) -> list[list[int]]:
    """Beginnings of different texts, or of later parts where texts are few, of each range of
    lengths those whose next token leads by most."""
    bounds = (*_CANARY_LENGTHS, _LONGEST_CANARY)
    length = min(_LONGEST_CANARY, max_seq_len - 1)
    parts = (
        text[begin : begin + length]
        for begin in range(0, max(map(len, texts), default=0), length)
        for text in texts
        if begin < len(text)
    )
    heads = list(islice(parts, _SEARCHED_TEXTS))
    leads = []
    for logits in probe.logits(engine, heads):
        best = np.partition(logits, -2, axis=1)[:, -2:]
        leads.append(best[:, 1] - best[:, 0])
    prompts = []
    for shortest, longest in pairwise(bounds):
        ranked = sorted(
            (-float(lead[shortest:longest].max()), number)
            for number, lead in enumerate(leads)
            if len(lead) > shortest
        )
        for _, number in ranked[:_PER_LENGTH]:
            last = shortest + int(leads[number][shortest:longest].argmax())
            prompts.append(heads[number][: last + 1].tolist())
    return prompts


def _num_sure(canary: Canary, margin: float) -> int:
    """How many of the first tokens lead by the margin."""
    unsure = (at for at, lead in enumerate(canary.margins) if lead < margin)
    return next(unsure, len(canary.margins))


def _sure_part(canary: Canary) -> Canary:
    count = _num_sure(canary, _CANARY_MARGIN)
    return Canary(
        prompt_ids=canary.prompt_ids,
        token_ids=canary.token_ids[:count],
        margins=canary.margins[:count],
    )
