"""Draws the next token of every row of a batch, on the host, in numpy.

    logits + bias -> penalties -> mask -> / temperature -> top-k -> top-p -> min-p -> inverse CDF

All filters together are one threshold per row: a token is kept if its scaled logit reaches the
threshold, so tokens that tie with the last one kept are kept too. A row uses one random number, a
function of (seed, sequence index, output position): nothing else in the batch changes its token.

Log-probabilities are the log-softmax of the raw logits of the tokens that the row's mask allows,
before bias, penalties, temperature and filters. A token that a mask forbids is never reported.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from trtc.protos.sampling import SAMPLING_PARAMETERS, SamplingParams
from trtc.runtime.sampling.masks import RowMasks
from trtc.runtime.sampling.philox import UInt64s, uniforms

Bools = NDArray[np.bool_]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Element = TypeVar("Element", bound=np.generic)

COLUMN_DTYPES: Mapping[str, Any] = {
    "f32": np.float32,
    "i32": np.int32,
    "i64": np.int64,
    "u64": np.uint64,
}
"""NumPy types of the dtype names in protos/step.py."""

NO_LOGPROBS = -1
"""In `SamplingBatch.num_logprobs`: the row requests none."""

NO_DRAFT = -1
"""In `SamplingBatch.drafts`: the row verifies no draft."""
WRONG_DRAFT = -2
"""In `SamplingBatch.drafts`: the row verifies a draft that is rejected, whatever is drawn."""

NO_PENDING = -1
"""In `SamplingBatch.pending`: `seen` has all tokens that count for penalties."""

_BLOCK = 128
"""Probabilities per block sum: a row is searched by block, then within one block."""
_TOP_CANDIDATES = 256
"""Largest logits that are sorted to find a top-p threshold, before the whole row is sorted."""
_NO_IDS: Int32s = np.zeros(0, np.int32)
_CHUNK_ELEMENTS = 1 << 18
"""Logits processed at once, so that the copies stay in the CPU's cache."""


class TokenCounts(NamedTuple):
    """Tokens of a sequence's prompt and output, for its penalties."""

    token_ids: Int32s
    """[D] distinct tokens of prompt and output."""
    in_output: Int32s
    """[D] how often each occurs in the output; 0: in the prompt only."""


class SparseRows(msgspec.Struct, frozen=True, eq=False):
    """A sparse [R, vocab] matrix in coordinate format."""

    rows: Int32s
    """[X]"""
    token_ids: Int32s
    """[X]; no (row, token) pair occurs twice."""
    values: NDArray[np.int32] | Float32s
    """[X]"""

    def joined(self, others: "SparseRows") -> "SparseRows":
        """These entries and others, sorted by row."""
        rows = np.concatenate((self.rows, others.rows))
        order = np.argsort(rows, kind="stable")
        token_ids = np.concatenate((self.token_ids, others.token_ids))
        values: NDArray[Any] = np.concatenate((self.values, others.values))
        values = values[order].astype(self.values.dtype)
        return SparseRows(rows[order], token_ids[order], values)


_NONE_SEEN = SparseRows(_NO_IDS, _NO_IDS, np.zeros(0, np.int32))
_NO_BIAS = SparseRows(_NO_IDS, _NO_IDS, np.zeros(0, np.float32))


class SamplingBatch(msgspec.Struct, frozen=True, eq=False):
    """How to draw one token for each of R logit rows.

    protos/step.py's SAMPLING_COLUMNS has the element type and the meaning of each array [R].
    """

    temperature: Float32s
    top_k: Int32s
    top_p: Float32s
    min_p: Float32s
    repetition_penalty: Float32s
    presence_penalty: Float32s
    frequency_penalty: Float32s
    seed: UInt64s
    sequence: Int64s
    position: Int64s
    num_logprobs: Int32s
    """NO_LOGPROBS: none, not even the drawn token's."""
    seen: SparseRows
    """Seen tokens of rows with a penalty; values int32: occurrences in the output."""
    bias: SparseRows
    """Float32 values added to the logits."""
    drafts: Int32s | None = None
    """[R] for a row that verifies a draft, the draft: the input token of the next row, which is of
    the same sequence, or WRONG_DRAFT; NO_DRAFT for other rows. None: no row verifies any."""
    masks: RowMasks | None = None
    """Masks of rows that may not draw every token; None: there are none."""
    pending: Int32s | None = None
    """[R] for a row with a penalty whose last token the host does not know yet, the row of the
    previous step that draws it; NO_PENDING for other rows. Only for executors that count pending
    tokens. None: `seen` has all tokens."""

    @property
    def num_rows(self) -> int:
        return len(self.temperature)

    @property
    def only_largest(self) -> bool:
        """Whether each row only draws its largest logit, without edits or log-probabilities."""
        return not (
            self.temperature.any()
            or len(self.seen.rows)
            or len(self.bias.rows)
            or self.masks is not None
            or (self.num_logprobs != NO_LOGPROBS).any()
        )

    def narrowed(self, vocab_size: int) -> Bools:
        """[R] whether a row has a filter: top-k, top-p or min-p. Greedy rows do not apply it."""
        in_top_k = (self.top_k > 0) & (self.top_k < vocab_size)
        return in_top_k | (self.top_p < 1) | (self.min_p > 0)

    @classmethod
    def greedy(cls, num_rows: int) -> "SamplingBatch":
        """The most likely token of each of `num_rows` rows, without log-probabilities."""
        return cls.of([SamplingParams(temperature=0.0)] * num_rows)

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        *,
        sequence: Sequence[int] | None = None,
        position: Sequence[int] | None = None,
        num_logprobs: Sequence[int | None] | None = None,
        counts: Mapping[int, TokenCounts] | None = None,
    ) -> "SamplingBatch":
        """Columns from one SamplingParams a row.

        Args:
            params: [R]; a seed of None counts as 0.
            sequence: [R], default 0.
            position: [R], default 0.
            num_logprobs: [R], default None: none.
            counts: row -> the tokens it has seen, for rows with penalties.
        """
        rows = len(params)
        asked = [None] * rows if num_logprobs is None else num_logprobs
        columns: dict[str, Any] = {
            one.name: _column([getattr(row, one.name) for row in params], COLUMN_DTYPES[one.dtype])
            for one in SAMPLING_PARAMETERS
        }
        return cls(
            **columns,
            seed=_column([one.seed or 0 for one in params], np.uint64),
            sequence=_column(sequence or [0] * rows, np.int64),
            position=_column(position or [0] * rows, np.int64),
            num_logprobs=_column([NO_LOGPROBS if n is None else n for n in asked], np.int32),
            seen=seen_rows(counts or {}),
            bias=bias_rows({row: one.logit_bias for row, one in enumerate(params)}),
        )


class Logprobs(NamedTuple):
    """Log-probabilities of the Q rows that request them, in nats."""

    rows: Int32s
    """[Q] ascending."""
    token: Float32s
    """[Q] log-probability of the drawn token."""
    top_ids: Int32s
    """[Q, L] most likely first, ties by id; entries past `num_top` are padding."""
    top: Float32s
    """[Q, L]"""
    num_top: Int32s
    """[Q] entries of the row: as many as it requests, at most the tokens that its mask allows."""


class SampledTokens(NamedTuple):
    """Tokens drawn by one step."""

    token_ids: Int32s
    """[R]"""
    logprobs: Logprobs | None = None
    """None when no row requests any."""
    invalid_rows: tuple[int, ...] = ()
    """Rows whose logits of allowed tokens hold NaN or have no finite maximum; their token ids are
    undefined."""
    counts: Bools | None = None
    """[R] whether a row's token extends its sequence: not if a draft before it was rejected. None:
    all do."""


def seen_rows(counts: Mapping[int, TokenCounts]) -> SparseRows:
    """Sparse rows of row -> seen tokens."""
    if not counts:
        return _NONE_SEEN
    seen = {row: (seen.token_ids, seen.in_output) for row, seen in counts.items()}
    return SparseRows(*_sparse(seen, np.int32))


def bias_rows(biases: Mapping[int, Mapping[int, float]]) -> SparseRows:
    """Sparse rows of row -> token id -> bias."""
    if not biases:
        return _NO_BIAS
    arrays = {
        row: (np.fromiter(bias.keys(), np.int32), np.fromiter(bias.values(), np.float32))
        for row, bias in biases.items()
        if bias
    }
    return SparseRows(*_sparse(arrays, np.float32))


def with_biases(bias: SparseRows, more: Mapping[int, Mapping[int, float]]) -> SparseRows:
    """`bias`, with row -> token id -> value added to it."""
    sums: dict[int, dict[int, float]] = {}
    for row, token, value in zip(
        bias.rows.tolist(), bias.token_ids.tolist(), bias.values.tolist(), strict=True
    ):
        sums.setdefault(row, {})[token] = value
    for row, added in more.items():
        there = sums.setdefault(row, {})
        for token, value in added.items():
            there[token] = there.get(token, 0.0) + value
    return bias_rows({row: sums[row] for row in sorted(sums)})


def sample(logits: Float32s, batch: SamplingBatch) -> SampledTokens:
    """Draw one token a row.

    Args:
        logits: [R, vocab] float32; not changed.
        batch: R rows, none of whose tokens is pending.
    """
    assert batch.pending is None, "runtime/sampling/pending.py counts pending tokens"
    assert logits.ndim == 2 and len(logits) == batch.num_rows, (logits.shape, batch.num_rows)
    token_ids = _argmax(logits)
    invalid = ~np.isfinite(logits[np.arange(len(logits)), token_ids])
    drawn = batch.temperature > 0
    if drawn.any() or len(batch.seen.rows) or len(batch.bias.rows) or batch.masks is not None:
        _draw_edited(logits, batch, drawn, token_ids, invalid)
    return SampledTokens(
        token_ids,
        logprobs=_logprobs(logits, batch, token_ids),
        invalid_rows=tuple(np.flatnonzero(invalid).tolist()),
        counts=None if batch.drafts is None else counted(token_ids, batch.drafts),
    )


def counted(token_ids: Int32s, drafts: Int32s) -> Bools:
    """[R] whether all drafts of the sequence before a row are equal to the drawn tokens."""
    goes_on = drafts != NO_DRAFT
    is_wrong = goes_on & (token_ids != drafts)
    wrong_before = np.cumsum(is_wrong) - is_wrong
    is_first = np.concatenate(([True], ~goes_on[:-1]))
    first_rows = np.maximum.accumulate(np.where(is_first, np.arange(len(drafts)), 0))
    right: Bools = wrong_before == wrong_before[first_rows]
    return right


def _draw_edited(
    logits: Float32s, batch: SamplingBatch, drawn: Bools, token_ids: Int32s, invalid: Bools
) -> None:
    """Fill in `token_ids` of the rows that are not simply the most likely token."""
    edited = drawn.copy()
    edited[batch.seen.rows] = True
    edited[batch.bias.rows] = True
    if batch.masks is not None:
        only_masked = np.flatnonzero(~(edited | invalid)[batch.masks.rows])
        _draw_allowed(logits, batch.masks, only_masked, token_ids, invalid)
    rows = np.flatnonzero(edited & ~invalid)
    chunk = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for begin in range(0, len(rows), chunk):
        part = rows[begin : begin + chunk]
        scores = logits[part]  # a copy: the caller's logits also give the log-probabilities
        _add_bias(scores, part, batch.bias)
        _penalise(scores, part, batch)
        masked = None if batch.masks is None else _mask(scores, part, batch.masks)
        best = _argmax(scores)
        if masked is not None:
            invalid[part[masked]] = ~np.isfinite(scores[masked, best[masked]])
        random = drawn[part] & ~invalid[part]
        if random.any():
            best[random] = _draw(scores[random], batch, part[random])
        token_ids[part] = best


def _draw_allowed(
    logits: Float32s, masks: RowMasks, at: Int64s, token_ids: Int32s, invalid: Bools
) -> None:
    """Draw the most likely token that each of the masks at these indices allows. Row by row, so
    that a row's logits stay in the CPU's cache."""
    for place in at.tolist():
        row = masks.rows[place]
        (left,) = masks.limits(np.array([place]), logits.shape[1])
        np.minimum(logits[row], left, out=left)
        best = left.argmax()
        token_ids[row] = best
        invalid[row] = not np.isfinite(left[best])


def _draw(scores: Float32s, batch: SamplingBatch, rows: Int64s) -> Int32s:
    """Sample rows with a temperature; overwrites `scores` [r, vocab]."""
    scores -= scores.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
        scores /= batch.temperature[rows, None]
    weights = _blocked_exp(scores)
    threshold = _threshold(scores, weights, batch, rows)
    if threshold is not None:
        flat = weights.reshape(len(weights), -1)[:, : scores.shape[1]]
        flat[scores < threshold[:, None]] = 0.0
    random = uniforms(batch.seed[rows], batch.sequence[rows], batch.position[rows])
    return _invert(weights, random)


def _threshold(
    scores: Float32s, weights: Float32s, batch: SamplingBatch, rows: Int64s
) -> Float32s | None:
    """[r] least score that is kept, or None if every token is kept."""
    vocab = scores.shape[1]
    if not batch.narrowed(vocab)[rows].any():
        return None
    top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
    top_k = np.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    threshold = np.full(len(scores), -np.inf, np.float32)
    sorted_rows = np.flatnonzero((top_k < vocab) | (top_p < 1))
    if len(sorted_rows):
        threshold[sorted_rows] = _sorted_threshold(
            scores[sorted_rows], weights[sorted_rows], top_k[sorted_rows], top_p[sorted_rows]
        )
    with np.errstate(divide="ignore"):
        np.maximum(threshold, np.log(min_p), out=threshold)  # scores are relative to the best
    return threshold


def _sorted_threshold(
    scores: Float32s, weights: Float32s, top_k: NDArray[np.integer], top_p: Float32s
) -> Float32s:
    """Thresholds of top-k, then of top-p over the tokens that top-k keeps."""
    vocab = scores.shape[1]
    limited = top_k[top_k < vocab]
    width = min(vocab, max(_TOP_CANDIDATES, int(limited.max()) if len(limited) else 0))
    best = _descending(scores, width)
    kth = np.where(top_k < vocab, best[np.arange(len(best)), np.minimum(top_k, width) - 1], -np.inf)
    masked = weights.reshape(len(weights), -1)[:, :vocab] * (scores >= kth[:, None])
    wanted = _row_sums(masked) * top_p
    threshold, found = _nucleus(best, kth, wanted)
    missing = np.flatnonzero(~found & (top_p < 1))
    if len(missing):
        threshold[missing], _ = _nucleus(
            _descending(scores[missing], vocab), kth[missing], wanted[missing]
        )
    return np.where(top_p < 1, threshold, kth).astype(np.float32)


def _nucleus(best: Float32s, kth: Float32s, wanted: Float64s) -> tuple[Float32s, Bools]:
    """Score at which the mass of the sorted candidates reaches `wanted`, and whether it does."""
    mass = np.cumsum(np.exp(best), axis=1, dtype=np.float64)
    reached = mass >= wanted[:, None]
    found = reached[:, -1]
    # Not reached because of rounding, where the candidates are the whole row.
    last = np.where(found, reached.argmax(axis=1), best.shape[1] - 1)
    return np.maximum(best[np.arange(len(best)), last], kth), found


def _descending(scores: Float32s, width: int) -> Float32s:
    """[r, width] largest scores, largest first."""
    vocab = scores.shape[1]
    best = np.partition(scores, vocab - width, axis=1)[:, vocab - width :]
    best.sort(axis=1)
    return best[:, ::-1]


def _blocked_exp(scores: Float32s) -> Float32s:
    """exp(scores) as [r, blocks, _BLOCK], padded with zeros."""
    rows, vocab = scores.shape
    blocks = -(-vocab // _BLOCK)
    weights = np.zeros((rows, blocks * _BLOCK), np.float32)
    np.exp(scores, out=weights[:, :vocab])
    return weights.reshape(rows, blocks, _BLOCK)


def _row_sums(values: Float32s) -> Float64s:
    """[r] sums of [r, vocab], blockwise in one fixed order."""
    rows, vocab = values.shape
    padded = np.zeros((rows, -(-vocab // _BLOCK) * _BLOCK), np.float32)
    padded[:, :vocab] = values
    blocks = padded.reshape(rows, -1, _BLOCK).sum(axis=2)
    return np.cumsum(blocks, axis=1, dtype=np.float64)[:, -1]


def _invert(weights: Float32s, random: Float64s) -> Int32s:
    """Token of each row at which the running sum of [r, blocks, _BLOCK] weights passes `random`."""
    each = np.arange(len(weights))
    cumulative = np.cumsum(weights.sum(axis=2), axis=1, dtype=np.float64)
    target = random * cumulative[:, -1]
    block = _first_above(cumulative, target)
    before = np.where(block > 0, cumulative[each, block - 1], 0.0)
    inside = np.cumsum(weights[each, block], axis=1, dtype=np.float64)
    return (block * _BLOCK + _first_above(inside, target - before)).astype(np.int32)


def _first_above(cumulative: Float64s, target: Float64s) -> Int64s:
    """[r] first index whose running sum passes the target, or the last with a positive weight, if
    rounding keeps the sum below the target.
    """
    first: Int64s = np.count_nonzero(cumulative <= target[:, None], axis=1)
    last_positive: Int64s = np.count_nonzero(cumulative < cumulative[:, -1:], axis=1)
    nearest: Int64s = np.minimum(first, last_positive)
    return nearest


def _add_bias(scores: Float32s, rows: Int64s, bias: SparseRows) -> None:
    if len(bias.rows):
        at, picked = _positions(bias.rows, rows)
        scores[at, bias.token_ids[picked]] += bias.values[picked]


def _penalise(scores: Float32s, rows: Int64s, batch: SamplingBatch) -> None:
    """Repetition over prompt and output, then presence and frequency over the output."""
    seen = batch.seen
    if not len(seen.rows):
        return
    at, picked = _positions(seen.rows, rows)
    tokens, counts, batch_rows = seen.token_ids[picked], seen.values[picked], seen.rows[picked]
    values = scores[at, tokens]
    repetition = batch.repetition_penalty[batch_rows]
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= batch.presence_penalty[batch_rows] * (counts > 0)
    values -= batch.frequency_penalty[batch_rows] * counts
    scores[at, tokens] = values


def _mask(scores: Float32s, rows: Int64s, masks: RowMasks) -> Int64s:
    """Set tokens that may not be drawn to -inf; returns which of the rows [r] have masks."""
    at, picked = _positions(masks.rows, rows)
    limits = masks.limits(picked, scores.shape[1])
    if len(at) == len(rows):
        np.minimum(scores, limits, out=scores)
    elif len(at):
        scores[at] = np.minimum(scores[at], limits)
    return at


def _positions(sparse: Int32s, rows: Int64s) -> tuple[Int64s, Int64s]:
    """The index in ascending `rows` of each sparse entry that is in them, and those entries."""
    at = np.searchsorted(rows, sparse)
    picked = np.flatnonzero((at < len(rows)) & (rows[np.minimum(at, len(rows) - 1)] == sparse))
    return at[picked], picked


def num_reported(batch: SamplingBatch, vocab_size: int) -> Int32s:
    """[R] most likely tokens that each row reports; NO_LOGPROBS as in the batch."""
    most: Int32s = np.minimum(batch.num_logprobs, np.int32(vocab_size))
    if batch.masks is not None:
        at = np.flatnonzero(most[batch.masks.rows] > 0)
        rows = batch.masks.rows[at]
        num_left = batch.masks.allowed(at, vocab_size).sum(axis=1)
        most[rows] = np.minimum(most[rows], num_left)
    return most


def _logprobs(logits: Float32s, batch: SamplingBatch, token_ids: Int32s) -> Logprobs | None:
    rows = np.flatnonzero(batch.num_logprobs != NO_LOGPROBS)
    if not len(rows):
        return None
    reported = num_reported(batch, logits.shape[1])[rows]
    width = int(batch.num_logprobs[rows].max())
    token = np.empty(len(rows), np.float32)
    top_ids = np.zeros((len(rows), width), np.int32)
    top = np.zeros((len(rows), width), np.float32)
    for at, row in enumerate(rows):
        values = _left_by_mask(logits[row], int(row), batch.masks)
        normaliser = _logsumexp(values)
        token[at] = values[token_ids[row]] - normaliser
        best = _likeliest(values, int(reported[at]))
        top_ids[at, : len(best)] = best
        top[at, : len(best)] = values[best] - normaliser
    return Logprobs(rows.astype(np.int32), token, top_ids, top, reported)


def _left_by_mask(values: Float32s, row: int, masks: RowMasks | None) -> Float32s:
    """The logits of a row, -inf for tokens that its mask forbids."""
    if masks is None or row not in masks.rows:
        return values
    (allowed,) = masks.allowed(np.flatnonzero(masks.rows == row), len(values))
    left: Float32s = np.where(allowed, values, np.float32(-np.inf))
    return left


def _logsumexp(values: Float32s) -> float:
    best = float(values.max())
    shifted = values - np.float32(best)
    return best + float(np.log(_row_sums(np.exp(shifted)[None])[0]))


def _likeliest(values: Float32s, number: int) -> Int64s:
    """Ids of the `number` largest values, largest first, ties by id."""
    number = min(number, len(values))
    if number == 0:
        return np.zeros(0, np.int64)
    least = np.partition(values, len(values) - number)[len(values) - number]
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")][:number]


def _argmax(values: Float32s) -> Int32s:
    best: Int64s = values.argmax(axis=1)
    return best.astype(np.int32)


def _column(values: Sequence[float], dtype: type[Element]) -> NDArray[Element]:
    return np.array(values, dtype=dtype)


def _sparse(
    rows: Mapping[int, tuple[Int32s, NDArray[Element]]], dtype: type[Element]
) -> tuple[Int32s, Int32s, NDArray[Element]]:
    if not rows:
        return _NO_IDS, _NO_IDS, np.zeros(0, dtype)
    lengths = [len(token_ids) for token_ids, _ in rows.values()]
    return (
        np.repeat(np.array(list(rows), np.int32), lengths),
        np.concatenate([token_ids for token_ids, _ in rows.values()]),
        np.concatenate([values for _, values in rows.values()]),
    )
