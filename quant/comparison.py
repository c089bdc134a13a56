"""Where two engines part: divergence by position, the tokens they disagree on most, and where their
greedy continuations of the same prompts first differ."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trtc.protos.errors import AccuracyError
from trtc.protos.manifest import Canary, LayerError
from trtc.quant.accuracy import (
    Float32s,
    Float64s,
    Int32s,
    check_finite,
    check_shape,
    kl_divergence,
    log_softmax,
    perplexity,
    row_chunks,
)

MAX_SPLITS = 12
"""Positions that are told one by one."""


@dataclass(frozen=True)
class Split:
    """A position where the two engines' likeliest tokens differ."""

    sequence: int
    position: int
    """Of the token that is predicted, in its sequence."""
    token: int
    """What the text has."""
    choices: tuple[int, int]
    """The likeliest token of each engine."""
    kl: float


@dataclass(frozen=True)
class Band:
    """Positions `begin` <= position < `end` of all sequences."""

    begin: int
    end: int
    tokens: int
    kl: float
    """Mean KL(first || second) in nats."""
    top1: float
    """Share of positions with the same likeliest token."""


@dataclass(frozen=True)
class Comparison:
    """Of the same text, means over the tokens that are predicted."""

    tokens: int
    perplexities: tuple[float, float]
    kl: float
    """Mean KL(first || second) in nats."""
    top1: float
    bands: tuple[Band, ...]
    """Ends are powers of two."""
    splits: tuple[Split, ...]
    """The largest divergences among the positions where the likeliest tokens differ."""


@dataclass(frozen=True)
class Continuation:
    """What both engines generate after a prompt, greedily."""

    prompt: int
    """Its number."""
    agreed: tuple[int, ...]
    """Tokens until they part."""
    choices: tuple[int, int] | None
    """The tokens at which they part; None: they do not."""
    margins: tuple[float, float] | None
    """Logits by which each led in its engine: where both are small, rounding parts them."""


@dataclass(frozen=True)
class LayerPair:
    """Quantisation noise at the output of one linear, as each engine's build measured it."""

    layer: str
    sqnr_db: tuple[float, float]

    @property
    def difference(self) -> float:
        """Decibels by which the second is noisier; negative: less noisy."""
        return self.sqnr_db[0] - self.sqnr_db[1]


def compare(
    first_logits: Iterable[Float32s],
    second_logits: Iterable[Float32s],
    token_ids: Sequence[Int32s],
) -> Comparison:
    """Compare two engines' predictions of a text.

    Args:
        first_logits: of every sequence [len, vocab]; row i predicts token i + 1.
        second_logits: likewise.
        token_ids: the sequences [len], each of two tokens or more.

    Raises:
        AccuracyError: logits that are not finite, or of vocabularies of different sizes.
    """
    rows = [
        _compare_sequence(number, ids, first, second)
        for number, (ids, first, second) in enumerate(
            zip(token_ids, first_logits, second_logits, strict=True)
        )
        if len(ids) > 1
    ]
    if not rows:
        raise AccuracyError("has no token to predict", field="text", remedy="Give a longer text")
    whole = _Rows(*(np.concatenate(parts) for parts in zip(*rows, strict=True)))
    for name, values in (("first", whole.first), ("second", whole.second), ("KL", whole.kl)):
        check_finite(**{name: float(values.sum())})
    tokens = len(whole.kl)
    return Comparison(
        tokens=tokens,
        perplexities=(
            perplexity(-float(whole.first.sum()), tokens),
            perplexity(-float(whole.second.sum()), tokens),
        ),
        kl=_mean_kl(whole.kl),
        top1=float((whole.choices[:, 0] == whole.choices[:, 1]).mean()),
        bands=tuple(_bands(whole)),
        splits=tuple(_splits(whole)),
    )


def continuation(prompt: int, first: Canary, second: Canary) -> Continuation:
    """Where two greedy continuations of prompt number `prompt` part."""
    length = min(len(first.token_ids), len(second.token_ids))
    pairs = list(zip(first.token_ids, second.token_ids, strict=False))
    at = next((at for at, (left, right) in enumerate(pairs) if left != right), length)
    if at == length:
        return Continuation(prompt, first.token_ids[:length], None, None)
    assert first.margins is not None and second.margins is not None
    return Continuation(
        prompt, first.token_ids[:at], pairs[at], (first.margins[at], second.margins[at])
    )


def layer_pairs(first: Sequence[LayerError], second: Sequence[LayerError]) -> tuple[LayerPair, ...]:
    """Linears whose noise both builds measured, those that differ most first."""
    others = {error.layer: error.sqnr_db for error in second}
    pairs = (
        LayerPair(error.layer, (error.sqnr_db, others[error.layer]))
        for error in first
        if error.layer in others
    )
    return tuple(sorted(pairs, key=lambda pair: (-abs(pair.difference), pair.layer)))


class _Rows(NamedTuple):
    """Of every predicted token."""

    sequence: Int32s
    position: Int32s
    token: Int32s
    choices: Int32s
    """[tokens, 2]"""
    first: Float64s
    """Log-probability of the text's token."""
    second: Float64s
    kl: Float64s


def _compare_sequence(number: int, ids: Int32s, first: Float32s, second: Float32s) -> _Rows:
    check_shape("first", first, ids)
    check_shape("second", second, ids, first.shape[1])
    parts = []
    for rows in row_chunks(len(ids) - 1, first.shape[1]):
        position = np.arange(rows.start + 1, rows.stop + 1, dtype=np.int32)
        token = ids[position]
        p, q = log_softmax(first[rows]), log_softmax(second[rows])
        each = np.arange(len(token))
        parts.append(
            _Rows(
                sequence=np.full(len(token), number, np.int32),
                position=position,
                token=token,
                choices=np.stack([p.argmax(1), q.argmax(1)], axis=1).astype(np.int32),
                first=p[each, token],
                second=q[each, token],
                kl=kl_divergence(p, q),
            )
        )
    return _Rows(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _bands(rows: _Rows) -> list[Band]:
    bands = []
    begin, end = 1, 2
    while begin <= rows.position.max():
        inside = (rows.position >= begin) & (rows.position < end)
        agree = rows.choices[inside, 0] == rows.choices[inside, 1]
        if len(agree):
            bands.append(
                Band(begin, end, len(agree), _mean_kl(rows.kl[inside]), float(agree.mean()))
            )
        begin, end = end, 2 * end
    return bands


def _splits(rows: _Rows) -> list[Split]:
    apart = np.flatnonzero(rows.choices[:, 0] != rows.choices[:, 1])
    worst = apart[np.argsort(-rows.kl[apart], kind="stable")][:MAX_SPLITS]
    return [
        Split(
            int(rows.sequence[at]),
            int(rows.position[at]),
            int(rows.token[at]),
            (int(rows.choices[at, 0]), int(rows.choices[at, 1])),
            float(rows.kl[at]),
        )
        for at in worst
    ]


def _mean_kl(kl: Float64s) -> float:
    """Rounding may leave a tiny negative mean where the two are equal."""
    return max(float(kl.mean()), 0.0)
