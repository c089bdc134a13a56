"""Accuracy metrics: KL divergence, top-1 agreement and perplexity, from streams of logits.

Everything is accumulated in float64 over chunks of rows, so that neither the vocabulary nor the
length of the text sets how much memory it takes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import AccuracyError, InvariantError
from trtc.protos.manifest import AccuracyFacts, LayerError
from trtc.quant.calibration_text import TokenSet

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Int32s = NDArray[np.int32]
_CHUNK_ELEMENTS = 1 << 20
"""Logits held in float64 at once: 8 MiB an array, of which there are half a dozen."""


@dataclass(frozen=True)
class Accuracy:
    """Means over the positions that have a next token to predict."""

    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    kl: float | None = None
    """Mean KL(reference || engine) in nats."""
    top1: float | None = None
    """Share of positions with the same most likely token."""

    def facts(
        self, texts: TokenSet, measured_on: str, layers: tuple[LayerError, ...] = ()
    ) -> AccuracyFacts:
        """These figures as the manifest records them.

        Args:
            texts: what was measured on.
            measured_on: what ran: `cpu:x86-64-v4`.
            layers: errors of the quantised linears.
        """
        return AccuracyFacts(
            text=texts.source,
            text_sha256=texts.sha256,
            tokens=self.tokens,
            perplexity=self.perplexity,
            reference_perplexity=self.reference_perplexity,
            kl=self.kl,
            top1=self.top1,
            measured_on=measured_on,
            layers=layers,
        )


def measure(
    engine_logits: Iterable[Float32s],
    reference_logits: Iterable[Float32s] | None,
    token_ids: Sequence[Int32s],
) -> Accuracy:
    """Compute perplexity on the text, and divergence from the reference's logits.

    Args:
        engine_logits: of every sequence [len, vocab]; row i predicts token i + 1.
        reference_logits: likewise, of the unquantised model; None when there is none.
        token_ids: the sequences [len], each of two tokens or more.

    Raises:
        AccuracyError: logits that are not finite.
    """
    engine, reference, divergence, agreement, tokens = 0.0, 0.0, 0.0, 0, 0
    references: Iterable[Float32s | None] = reference_logits or (None for _ in token_ids)
    for ids, ours, theirs in zip(token_ids, engine_logits, references, strict=True):
        check_shape("engine", ours, ids)
        if theirs is not None:
            check_shape("reference", theirs, ids, ours.shape[1])
        for rows in row_chunks(len(ids) - 1, ours.shape[1]):
            targets = ids[rows.start + 1 : rows.stop + 1]
            p = log_softmax(ours[rows])
            engine -= _picked(p, targets)
            if theirs is not None:
                q = log_softmax(theirs[rows])
                reference -= _picked(q, targets)
                divergence += float(kl_divergence(q, p).sum())
                agreement += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        tokens += len(ids) - 1
    if not tokens:
        raise AccuracyError("has no token to predict", field="text", remedy="Give a longer text")
    check_finite(engine=engine, reference=reference, divergence=divergence)
    if reference_logits is None:
        return Accuracy(tokens, perplexity(engine, tokens))
    return Accuracy(
        tokens,
        perplexity(engine, tokens),
        perplexity(reference, tokens),
        # Rounding may leave a tiny negative sum where the two are equal.
        max(divergence / tokens, 0.0),
        agreement / tokens,
    )


def log_softmax(logits: NDArray[Any]) -> Float64s:
    """Log-probabilities of each row, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def kl_divergence(log_p: Float64s, log_q: Float64s) -> Float64s:
    """KL(p || q) of each row, from log-probabilities; terms with p = 0 are 0."""
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):
        terms = np.where(p > 0, p * (log_p - log_q), 0.0)
    result: Float64s = terms.sum(axis=1)
    return result


def perplexity(negative_log_likelihood: float, tokens: int) -> float:
    """exp of the mean; infinite where that exceeds what a float holds."""
    mean = negative_log_likelihood / tokens
    return math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else math.inf


def _picked(log_probabilities: Float64s, targets: Int32s) -> float:
    return float(log_probabilities[np.arange(len(targets)), targets].sum())


def row_chunks(rows: int, vocab_size: int) -> Iterator[slice]:
    """Rows whose logits are held in float64 at once."""
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def check_shape(whose: str, logits: Float32s, ids: Int32s, vocab_size: int | None = None) -> None:
    """Check that logits are [len(ids), vocab_size].

    Raises:
        AccuracyError: they are of another vocabulary.
        InvariantError: they are not of these tokens.
    """
    if logits.ndim != 2 or len(logits) != len(ids):
        raise InvariantError(f"{whose} logits {logits.shape} are not of {len(ids)} tokens")
    if vocab_size is not None and logits.shape[1] != vocab_size:
        raise AccuracyError(
            f"has {logits.shape[1]} tokens where the engine has {vocab_size}",
            field="vocabulary of the reference",
            remedy="Compare with the checkpoint that the engine was built from",
        )


def check_finite(**sums: float) -> None:
    """Check sums by name.

    Raises:
        AccuracyError: one is infinite, or not a number.
    """
    for name, value in sums.items():
        if not math.isfinite(value):
            raise AccuracyError(
                f"the {name} sum is {value}",
                field="logits",
                remedy="The quantised model overflows; try another --dtype",
            )
