"""Builds a step's arrays from its plan and from tables with one row per lane, without a loop over
tokens.

    lane  tokens                  pages        sampling columns
    0     5 17 9 2 11 ~3 . . .    8 2 . . .    temperature, top_k, ..., seed
    1     ...

The tables follow the scheduler: a sequence is written as a whole when it is placed on its lane,
then page by page as it grows, and token by token as they are drawn, for all lanes of a step at
once. In a step that is built before a token is known, ~row (which is negative) stands for the token
that this row of the previous step draws.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from trtc.protos.sampling import SAMPLING_PARAMETERS
from trtc.protos.step import SAMPLING_COLUMNS
from trtc.runtime.engine.draft_layout import place_states, with_drafts_apart
from trtc.runtime.executors.base import NO_SOURCE, StepBatch
from trtc.runtime.sampling.masks import RowMasks
from trtc.runtime.sampling.philox import UInt64s
from trtc.runtime.sampling.sampler import (
    COLUMN_DTYPES,
    NO_DRAFT,
    NO_LOGPROBS,
    NO_PENDING,
    WRONG_DRAFT,
    Bools,
    Int32s,
    Int64s,
    SamplingBatch,
    SparseRows,
    TokenCounts,
    bias_rows,
    seen_rows,
    with_biases,
)
from trtc.runtime.scheduling.scheduler_state import Changes
from trtc.runtime.scheduling.sequence import Sequence
from trtc.runtime.scheduling.step_plan import StepPlan

_NO_LANE = -1
_FORCED = 3e38
"""A bias that makes a finite logit the largest, and keeps it finite."""


class MaskedRows(NamedTuple):
    """Rows of a step that draw a sequence's next token with a mask, and those after its drafts."""

    sequence: Sequence
    first: int
    number: int
    """Number of rows: more than one where a request forks, or has drafts."""
    drafts: Items[int] = ()
    """Tokens that the step verifies, number - 1."""


class BuiltStep(msgspec.Struct, frozen=True, eq=False):
    """The arrays of a step that is ready to launch."""

    batch: StepBatch
    sampling: SamplingBatch
    appended_rows: Int64s
    """[A] rows whose tokens extend a sequence on its lane, if they count: all samples except those
    that start other sequences of a fork, which are placed on their own lanes."""
    appended_lanes: Int64s
    """[A] lane of each."""
    appended_positions: Int64s
    """[A] position of each in its sequence."""
    appended_tenancies: Int64s
    """[A] tenancy of the lane at launch: when the token is known, another sequence may have it."""
    masked: tuple[MaskedRows, ...] = ()
    """Rows that are drawn with a mask."""
    counted_lanes: Int64s | None = None
    """[R] lane whose seen tokens count for a row's penalties, or _NO_LANE. Set if the previous step
    has still to draw some of them. None: `sampling` has them all."""

    @property
    def is_drawn_late(self) -> bool:
        """Whether its draws need masks or tokens that the host does not have at launch."""
        return bool(self.masked) or self.counted_lanes is not None


class StepBuilder:
    """The tables of one engine."""

    def __init__(
        self,
        *,
        num_lanes: int,
        max_context: int,
        page_size: int,
        num_groups: int = 1,
        state_group: int | None = None,
        counts_pending: bool = False,
        drafts_as_sequences: bool = False,
    ) -> None:
        """For `state_group` see KvPool, for `counts_pending` Executor, for `drafts_as_sequences`
        DraftRows."""
        self._state_group = state_group
        self._counts_pending = counts_pending
        self._page_size = page_size
        self._drafts_as_sequences = drafts_as_sequences
        self._tokens = np.zeros((num_lanes, max_context), np.int32)
        self._pages = [
            np.zeros((num_lanes, -(-max_context // page_size)), np.int32) for _ in range(num_groups)
        ]
        """Page table of each group of the cache layout."""
        self._num_prompt = np.zeros(num_lanes, np.int64)
        self._position_offsets = np.zeros(num_lanes, np.int64)
        self._tenancies = np.zeros(num_lanes, np.int64)
        """[num_lanes] number of sequences placed on each lane so far."""
        self._sampling = _SamplingColumns(num_lanes)
        self._last: BuiltStep | None = None
        """The last built step, while its tokens are unknown."""

    def follow(self, changes: Changes) -> None:
        """Apply the scheduler's changes to the tables."""
        for sequence in changes.placed:
            if sequence.lanes:  # else it has ended since
                self._place(sequence)
        for sequence, begin, end in changes.grown:
            if sequence.lanes:
                for table, pages in zip(self._pages, sequence.pages, strict=True):
                    if end == begin + 1:  # a decode: by far the most common
                        table[sequence.lane, begin] = pages[begin]
                    else:
                        table[sequence.lane, begin:end] = pages[begin:end]

    def _place(self, sequence: Sequence) -> None:
        lane = sequence.lane
        self._tenancies[lane] += 1
        self._tokens[lane, : len(sequence.token_ids)] = sequence.token_ids
        for table, pages in zip(self._pages, sequence.pages, strict=True):
            table[lane, : len(pages)] = pages
        self._num_prompt[lane] = sequence.num_prompt
        self._position_offsets[lane] = sequence.position_offset
        self._sampling.place(sequence)

    def append(self, step: BuiltStep, token_ids: Int32s, held: Collection[Sequence] = ()) -> None:
        """Append drawn tokens [R] to the sequences that are still on their lanes, except those in
        `held`."""
        if self._last is step:
            self._last = None
        held_lanes = [sequence.lane for sequence in held if sequence.lanes]
        lanes, rows = self._write(step, token_ids)
        if held_lanes:  # the cells will be overwritten
            counts = ~np.isin(lanes, held_lanes)
            lanes, rows = lanes[counts], rows[counts]
        self._sampling.count(lanes, token_ids[rows])

    def _write(self, step: BuiltStep, cells: Int32s) -> tuple[Int64s, Int64s]:
        """Write the cell of each row [R] behind its sequence; returns lanes and rows written."""
        stays = self._tenancies[step.appended_lanes] == step.appended_tenancies
        # A sequence of maximum length ends with its token, for which there is no cell.
        stays &= step.appended_positions < self._tokens.shape[1]
        lanes, rows = step.appended_lanes[stays], step.appended_rows[stays]
        self._tokens[lanes, step.appended_positions[stays]] = cells[rows]
        return lanes, rows

    def _slots(self, token_lanes: Int64s, page: Int64s, offset: Int32s) -> Int32s:
        """Slots of all groups, one after the other, from each token's page and offset in it."""
        size = np.int32(self._page_size)
        return _joined_groups([table[token_lanes, page] * size + offset for table in self._pages])

    def build(self, plan: StepPlan) -> BuiltStep:
        """Arrays of a plan that has been applied and followed; must be the next step launched."""
        if self._last is not None:
            self._write(self._last, ~np.arange(self._last.sampling.num_rows, dtype=np.int32))
        if plan.has_drafts:
            self._write_drafts(plan)
        layout = _layout(plan)
        token_lanes, positions, places = layout.token_lanes, layout.positions, layout.places
        page, offset = np.divmod(positions, self._page_size)
        width = -(-int(layout.context_lens.max()) // self._page_size)
        cells = self._tokens[token_lanes, positions]
        token_ids, token_sources = (cells, None) if self._last is None else _split(cells)
        slots = self._slots(token_lanes, page, offset.astype(np.int32))
        if self._state_group is not None and (plan.has_drafts or plan.kept):
            states = slots.reshape(len(self._pages), -1)[self._state_group]
            place_states(states, plan, layout.query_start, self._page_size)
        batch = StepBatch(
            token_ids=token_ids,
            token_sources=token_sources,
            positions=(positions + self._position_offsets[token_lanes]).astype(np.int32),
            slots=slots,
            query_start=layout.query_start.astype(np.int32),
            context_lens=layout.context_lens.astype(np.int32),
            page_table=_joined_groups([table[layout.lanes, :width] for table in self._pages]),
            logit_rows=layout.logit_rows.astype(np.int32),
        )
        if plan.has_drafts and self._drafts_as_sequences:
            batch = with_drafts_apart(batch, plan, self._state_group, self._page_size)
        row_lanes, row_positions = layout.lanes[layout.row_chunks], layout.row_positions
        sampling = self._sampling.gather(
            row_lanes,
            forks=np.maximum(places, 0),
            positions=row_positions - self._num_prompt[row_lanes],
        )
        extends = places == 0
        if plan.has_drafts:
            has_drafts = np.array([chunk.num_drafts > 0 for chunk in plan.chunks])
            is_drafted = (places < 0) & has_drafts[layout.row_chunks]
            extends |= is_drafted
            following = self._tokens[row_lanes, row_positions * is_drafted]
            sampling = replace(sampling, drafts=np.where(is_drafted, following, np.int32(NO_DRAFT)))
        if plan.scores:
            has_scored = np.array([chunk.num_scored > 0 for chunk in plan.chunks])
            is_scored = (places < 0) & has_scored[layout.row_chunks]
            sampling = self._sampling.scoring(
                sampling, row_lanes, is_scored, self._tokens[row_lanes, row_positions * is_scored]
            )
        counted_lanes = None
        if token_sources is not None and self._sampling.has_penalties:
            last = self._tokens[row_lanes, row_positions - 1]
            is_counted = (last < 0) & self._sampling.counts_tokens_of(row_lanes)
            if is_counted.any():
                if self._counts_pending:
                    pending = np.where(is_counted, ~last, np.int32(NO_PENDING))
                    sampling = replace(sampling, pending=pending)
                else:
                    counted_lanes = np.where(places < 0, _NO_LANE, row_lanes)
        (first_samples,) = extends.nonzero()
        appended_lanes = row_lanes[first_samples]
        self._last = BuiltStep(
            batch=batch,
            sampling=sampling,
            appended_rows=first_samples,
            appended_lanes=appended_lanes,
            appended_positions=row_positions[first_samples],
            appended_tenancies=self._tenancies[appended_lanes],
            masked=_masked_rows(plan) if self._sampling.masked else (),
            counted_lanes=counted_lanes,
        )
        return self._last

    def history(self, sequence: Sequence) -> Int32s:
        """The tokens of a sequence that is on its lane, all known; a view."""
        return self._tokens[sequence.lane, : len(sequence.token_ids)]

    def _write_drafts(self, plan: StepPlan) -> None:
        """Write drafts behind the known tokens; drawn tokens will overwrite them."""
        for chunk in plan.chunks:
            if chunk.num_drafts:
                sequence, begin = chunk.sequence, chunk.start + 1
                drafts = sequence.drafts[: chunk.num_drafts]
                self._tokens[sequence.lane, begin : begin + chunk.num_drafts] = drafts

    def late_sampling(
        self,
        step: BuiltStep,
        masks: RowMasks | None,
        biases: Mapping[int, Mapping[int, float]],
        last_rows: Items[int] = (),
    ) -> SamplingBatch:
        """The sampling batch of a step once the tokens of its sequences are all known.

        Args:
            biases: row -> token id -> bias of its logit, in addition to the request's biases.
            last_rows: rows that verify drafts, which must be rejected.
        """
        sampling = replace(step.sampling, masks=masks)
        if last_rows:
            assert sampling.drafts is not None
            drafts = sampling.drafts.copy()
            drafts[list(last_rows)] = WRONG_DRAFT
            sampling = replace(sampling, drafts=drafts)
        if biases:
            sampling = replace(sampling, bias=with_biases(sampling.bias, biases))
        if step.counted_lanes is None:
            return sampling
        return replace(sampling, seen=self._sampling.seen_by(step.counted_lanes.tolist()))


class _Layout(NamedTuple):
    """Positions of the T tokens and R logit rows of a step's B chunks."""

    lanes: Int64s
    """[B]"""
    context_lens: Int64s
    """[B] tokens of each sequence after the step."""
    query_start: Int64s
    """[B+1] prefix sums of its new tokens."""
    token_lanes: Int64s
    """[T]"""
    positions: Int64s
    """[T] in the sequence."""
    row_chunks: Int64s
    """[R] chunk of each row."""
    logit_rows: Int64s
    """[R] index of the token, of T, whose logits the row has."""
    row_positions: Int64s
    """[R] position in the sequence of the token after that one."""
    places: Int64s
    """[R] index among the samples of its chunk (a fork's sequences are 0 to n - 1); negative: a row
    before the samples, for a scored token or a draft."""


def _layout(plan: StepPlan) -> _Layout:
    sequences, starts, counts, samples, scored, drafts = zip(*plan.chunks, strict=True)
    lanes = np.array([sequence.lane for sequence in sequences], np.int64)
    if counts == samples == (1,) * len(lanes):
        return _layout_of_decodes(lanes, np.array(starts, np.int64))
    columns = [np.array(column, np.int64) for column in (starts, counts, samples, scored, drafts)]
    return _layout_of_chunks(lanes, *columns[:3], leading=columns[3] + columns[4])


def _layout_of_decodes(lanes: Int64s, starts: Int64s) -> _Layout:
    """The layout if each chunk has one token and one row, as in most steps."""
    numbers = np.arange(len(lanes) + 1)
    each, ends = numbers[:-1], starts + 1
    return _Layout(lanes, ends, numbers, lanes, starts, each, each, ends, np.zeros_like(each))


def _layout_of_chunks(
    lanes: Int64s, starts: Int64s, counts: Int64s, samples: Int64s, *, leading: Int64s
) -> _Layout:
    """
    Args:
        leading: [B] number of rows before the samples.
    """
    ends = counts.cumsum()
    context_lens = starts + counts
    rows = leading + samples
    row_chunks = np.arange(len(lanes)).repeat(rows)
    places = np.arange(len(row_chunks)) - (rows.cumsum() - samples).repeat(rows)
    # Number of tokens from the row's token to the end of the chunk.
    back = np.where(places < 0, (counts - leading)[row_chunks] - places, 1)
    return _Layout(
        lanes=lanes,
        context_lens=context_lens,
        query_start=np.concatenate(([0], ends)),
        token_lanes=lanes.repeat(counts),
        positions=np.arange(ends[-1]) - (ends - context_lens).repeat(counts),
        row_chunks=row_chunks,
        logit_rows=ends[row_chunks] - back,
        row_positions=context_lens[row_chunks] - back + 1,
        places=places,
    )


def _masked_rows(plan: StepPlan) -> tuple[MaskedRows, ...]:
    found, row = [], 0
    for sequence, _, _, num_samples, num_scored, num_drafts in plan.chunks:
        row += num_scored
        if num_samples and sequence.request.masks is not None:
            drafts = tuple(sequence.drafts[:num_drafts])
            found.append(MaskedRows(sequence, row, num_drafts + num_samples, drafts))
        row += num_drafts + num_samples
    return tuple(found)


def _joined_groups(arrays: list[Int32s]) -> Int32s:
    """The arrays of all groups, one after the other."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _split(cells: Int32s) -> tuple[Int32s, Int32s | None]:
    """Token ids of cells of the table and, if any is pending, the rows that draw them."""
    pending = cells < 0
    if not pending.any():
        return cells, None
    return np.where(pending, 0, cells), np.where(pending, ~cells, NO_SOURCE)


class _SamplingColumns:
    """Each lane's sampling parameters."""

    def __init__(self, num_lanes: int) -> None:
        self._columns: dict[str, NDArray[Any]] = {
            one.name: np.zeros(num_lanes, COLUMN_DTYPES[one.dtype])
            for one in SAMPLING_COLUMNS
            if one.device_dtype
        }
        self._seed: UInt64s = np.zeros(num_lanes, np.uint64)
        self._index = np.zeros(num_lanes, np.int64)
        self._num_prompt_logprobs = np.zeros(num_lanes, np.int32)
        self._seen: dict[int, _SeenTokens] = {}
        """Lanes with penalties."""
        self._bias: dict[int, dict[int, float]] = {}
        """Lanes with biases."""
        self._early: dict[int, _EarlyBias] = {}
        """Lanes with `min_tokens`."""
        self.masked: set[int] = set()
        """Lanes with masks."""

    @property
    def has_penalties(self) -> bool:
        """Whether any lane has."""
        return bool(self._seen)

    def counts_tokens_of(self, lanes: Int64s) -> Bools:
        """Whether each of these lanes has penalties."""
        return np.isin(lanes, list(self._seen))

    def place(self, sequence: Sequence) -> None:
        lane, request = sequence.lane, sequence.request
        params = request.sampling
        assert params.seed is not None, "drawn when the request is admitted"
        columns = self._columns
        for one in SAMPLING_PARAMETERS:
            columns[one.name][lane] = getattr(params, one.name)
        self._seed[lane] = params.seed
        self._index[lane] = sequence.index
        columns["num_logprobs"][lane] = (
            NO_LOGPROBS if request.logprobs is None else request.logprobs
        )
        self._num_prompt_logprobs[lane] = request.prompt_logprobs or 0
        self._bias.pop(lane, None)
        if params.logit_bias:
            self._bias[lane] = dict(params.logit_bias)
        self._early.pop(lane, None)
        if request.min_tokens and sequence.stop_ids:
            never = dict.fromkeys(sequence.stop_ids, -math.inf)
            self._early[lane] = _EarlyBias(request.min_tokens, {**params.logit_bias, **never})
        self._seen.pop(lane, None)
        self.masked.discard(lane)
        if request.masks is not None:
            self.masked.add(lane)
        if params.has_penalty:
            self._seen[lane] = _SeenTokens(sequence.token_ids, sequence.num_prompt)

    def count(self, lanes: Int64s, token_ids: Int32s) -> None:
        """Count drawn tokens on lanes with penalties."""
        if self._seen:
            for lane, token in zip(lanes.tolist(), token_ids.tolist(), strict=True):
                if lane in self._seen:
                    self._seen[lane].add(token)

    def gather(self, lanes: Int64s, *, forks: Int64s, positions: Int64s) -> SamplingBatch:
        row_lanes = lanes.tolist() if self._seen or self._bias or self._early else []
        columns: dict[str, Any] = {name: column[lanes] for name, column in self._columns.items()}
        return SamplingBatch(
            **columns,
            seed=self._seed[lanes],
            sequence=self._index[lanes] + forks,
            position=positions,
            seen=self.seen_by(row_lanes),
            bias=bias_rows(
                {
                    row: bias
                    for row, lane in enumerate(row_lanes)
                    if (bias := self._bias_of(lane, positions[row]))
                }
            ),
        )

    def seen_by(self, lanes: list[int]) -> SparseRows:
        """The seen tokens of rows with these lanes; lanes without penalties have none."""
        return seen_rows(
            {row: self._seen[lane].counts() for row, lane in enumerate(lanes) if lane in self._seen}
        )

    def scoring(
        self, sampling: SamplingBatch, lanes: Int64s, is_scored: Bools, token_ids: Int32s
    ) -> SamplingBatch:
        """The same batch, in which rows `is_scored` [R] score known tokens.

        A bias larger than any logit forces such a row to draw its known token, because every
        sampler reports the log-probability of the drawn token, from the logits before the bias.
        """
        scored = np.flatnonzero(is_scored)
        kept = [_without_rows(entries, is_scored) for entries in (sampling.seen, sampling.bias)]
        forced = bias_rows({int(row): {int(token_ids[row]): _FORCED} for row in scored})
        return replace(
            sampling,
            temperature=np.where(is_scored, np.float32(0), sampling.temperature),
            num_logprobs=np.where(
                is_scored, self._num_prompt_logprobs[lanes], sampling.num_logprobs
            ),
            seen=kept[0],
            bias=kept[1].joined(forced),
        )

    def _bias_of(self, lane: int, position: np.int64) -> dict[int, float] | None:
        """Bias of the token at `position` of a lane's output; None: there is none."""
        early = self._early.get(lane)
        if early is not None and position < early.min_tokens:
            return early.bias
        return self._bias.get(lane)


def _without_rows(entries: SparseRows, dropped: Bools) -> SparseRows:
    kept = ~dropped[entries.rows]
    return SparseRows(entries.rows[kept], entries.token_ids[kept], entries.values[kept])


class _EarlyBias(NamedTuple):
    """Keeps a sequence from ending before it has `min_tokens` tokens."""

    min_tokens: int
    bias: dict[int, float]
    """The request's own, and -inf for each token that would end it."""


class _SeenTokens:
    """Distinct tokens of one sequence and their counts in its output, as arrays."""

    def __init__(self, token_ids: Iterable[int], num_prompt: int) -> None:
        known = list(token_ids)
        distinct = list(dict.fromkeys(known))
        self._index = {token: at for at, token in enumerate(distinct)}
        self._size = len(distinct)
        self._token_ids = np.array(distinct, np.int32)
        self._in_output: NDArray[np.int32] = np.zeros(self._size, np.int32)
        for token in known[num_prompt:]:
            self._in_output[self._index[token]] += 1

    def add(self, token: int) -> None:
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = self._size
            self._size += 1
            if at == len(self._token_ids):
                grown = max(64, 2 * at)
                self._token_ids = np.resize(self._token_ids, grown)
                self._in_output = np.resize(self._in_output, grown)
            self._token_ids[at] = token
            self._in_output[at] = 0
        self._in_output[at] += 1

    def counts(self) -> TokenCounts:
        return TokenCounts(self._token_ids[: self._size], self._in_output[: self._size])
