"""Turns a step plan into arrays, from tables with one row a lane, without a loop over tokens.

    lane  tokens                  pages        sampling columns
    0     5 17 9 2 11 ~3 . . .    8 2 . . .    temperature, top_k, ..., seed
    1     ...

The tables follow the scheduler: a sequence is written whole when it is placed on its lane, page by
page as it grows, and token by token as they are drawn, all lanes of a step at once. If a step is
built before that, ~row (negative, as no token is) stands for what a row of the last step draws.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtc.runtime.executors.base import NO_SOURCE, StepBatch
from trtc.runtime.philox import UInt64s
from trtc.runtime.sampler import (
    NO_LOGPROBS,
    Float32s,
    Int32s,
    Int64s,
    SamplingBatch,
    TokenCounts,
    bias_rows,
    seen_rows,
)
from trtc.runtime.scheduler_state import Changes
from trtc.runtime.sequence import Sequence
from trtc.runtime.step_plan import StepPlan


@dataclass(frozen=True, eq=False)
class BuiltStep:
    """A step ready to launch."""

    batch: StepBatch
    sampling: SamplingBatch
    appended_rows: Int64s
    """[A] samples that extend a sequence on its lane: all but those that begin a fork's others,
    which are placed on lanes of their own."""
    appended_lanes: Int64s
    """[A]"""
    appended_positions: Int64s
    """[A] where in its sequence each goes."""
    appended_tenancies: Int64s
    """[A] which sequence had the lane: by the time of the token it may be another's."""


class StepBuilder:
    """The tables of one engine."""

    def __init__(self, *, num_lanes: int, max_context: int, page_size: int) -> None:
        self._page_size = page_size
        self._tokens = np.zeros((num_lanes, max_context), np.int32)
        self._pages = np.zeros((num_lanes, -(-max_context // page_size)), np.int32)
        self._num_prompt = np.zeros(num_lanes, np.int64)
        self._tenancies = np.zeros(num_lanes, np.int64)
        """[num_lanes] sequences that have been placed on each lane."""
        self._sampling = _SamplingColumns(num_lanes)
        self._last: BuiltStep | None = None
        """The step built last, while its tokens are not known."""

    def follow(self, changes: Changes) -> None:
        """Take over what the scheduler changed."""
        for sequence in changes.placed:
            if sequence.lanes:  # else it has ended since
                self._place(sequence)
        for sequence, index in changes.grown:
            if sequence.lanes:
                self._pages[sequence.lane, index] = sequence.pages[index]

    def _place(self, sequence: Sequence) -> None:
        lane = sequence.lane
        self._tenancies[lane] += 1
        self._tokens[lane, : len(sequence.token_ids)] = sequence.token_ids
        self._pages[lane, : len(sequence.pages)] = sequence.pages
        self._num_prompt[lane] = sequence.num_prompt
        self._sampling.place(sequence)

    def append(self, step: BuiltStep, token_ids: Int32s) -> None:
        """Write drawn tokens [R] behind those sequences that still are on their lanes."""
        if self._last is step:
            self._last = None
        lanes, rows = self._write(step, token_ids)
        self._sampling.count(lanes, token_ids[rows])

    def _write(self, step: BuiltStep, cells: Int32s) -> tuple[Int64s, Int64s]:
        """Write one cell a row [R] behind those sequences; their lanes and rows."""
        stays = self._tenancies[step.appended_lanes] == step.appended_tenancies
        # A sequence as long as can be ends with its token: there is no cell for that.
        stays &= step.appended_positions < self._tokens.shape[1]
        lanes, rows = step.appended_lanes[stays], step.appended_rows[stays]
        self._tokens[lanes, step.appended_positions[stays]] = cells[rows]
        return lanes, rows

    def build(self, plan: StepPlan) -> BuiltStep:
        """Arrays of a plan that has been applied and followed, to launch before any other."""
        if self._last is not None:
            self._write(self._last, ~np.arange(self._last.sampling.num_rows, dtype=np.int32))
        sequences, *columns = zip(*plan.chunks, strict=True)
        lanes = np.array([sequence.lane for sequence in sequences], np.int64)
        starts, counts, samples = (np.array(column, np.int64) for column in columns)
        ends = np.cumsum(counts)
        context_lens = starts + counts
        token_lanes = np.repeat(lanes, counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
        page, offset = np.divmod(positions, self._page_size)
        width = -(-int(context_lens.max()) // self._page_size)
        cells = self._tokens[token_lanes, positions]
        token_ids, token_sources = (cells, None) if self._last is None else _split(cells)
        batch = StepBatch(
            token_ids=token_ids,
            token_sources=token_sources,
            positions=positions.astype(np.int32),
            slots=self._pages[token_lanes, page] * np.int32(self._page_size)
            + offset.astype(np.int32),
            query_start=np.concatenate(([0], ends)).astype(np.int32),
            context_lens=context_lens.astype(np.int32),
            page_table=self._pages[lanes, :width],
            logit_rows=np.repeat(ends - 1, samples).astype(np.int32),
        )
        row_lanes = np.repeat(lanes, samples)
        row_positions = np.repeat(context_lens, samples)
        # A row's place among the samples of its chunk: a fork's sequences are 0 to n - 1.
        forks = np.arange(len(row_lanes)) - np.repeat(np.cumsum(samples) - samples, samples)
        sampling = self._sampling.gather(
            row_lanes, forks=forks, positions=row_positions - self._num_prompt[row_lanes]
        )
        rows = np.flatnonzero(forks == 0)
        self._last = BuiltStep(
            batch=batch,
            sampling=sampling,
            appended_rows=rows,
            appended_lanes=row_lanes[rows],
            appended_positions=row_positions[rows],
            appended_tenancies=self._tenancies[row_lanes[rows]],
        )
        return self._last


def _split(cells: Int32s) -> tuple[Int32s, Int32s | None]:
    """Token ids and, if any of them is pending, where they come from, of cells of the table."""
    pending = cells < 0
    if not pending.any():
        return cells, None
    return np.where(pending, 0, cells), np.where(pending, ~cells, NO_SOURCE)


class _SamplingColumns:
    """Each lane's sampling parameters."""

    def __init__(self, num_lanes: int) -> None:
        def floats() -> Float32s:
            return np.zeros(num_lanes, np.float32)

        self._temperature = floats()
        self._top_k = np.zeros(num_lanes, np.int32)
        self._top_p = floats()
        self._min_p = floats()
        self._repetition_penalty = floats()
        self._presence_penalty = floats()
        self._frequency_penalty = floats()
        self._seed: UInt64s = np.zeros(num_lanes, np.uint64)
        self._index = np.zeros(num_lanes, np.int64)
        self._num_logprobs = np.zeros(num_lanes, np.int32)
        self._seen: dict[int, _SeenTokens] = {}
        """Lanes with penalties."""
        self._bias: dict[int, dict[int, float]] = {}
        """Lanes with biases."""

    def place(self, sequence: Sequence) -> None:
        lane, request = sequence.lane, sequence.request
        params = request.sampling
        assert params.seed is not None, "drawn when the request is admitted"
        self._temperature[lane] = params.temperature
        self._top_k[lane] = params.top_k
        self._top_p[lane] = params.top_p
        self._min_p[lane] = params.min_p
        self._repetition_penalty[lane] = params.repetition_penalty
        self._presence_penalty[lane] = params.presence_penalty
        self._frequency_penalty[lane] = params.frequency_penalty
        self._seed[lane] = params.seed
        self._index[lane] = sequence.index
        self._num_logprobs[lane] = NO_LOGPROBS if request.logprobs is None else request.logprobs
        self._bias.pop(lane, None)
        if params.logit_bias:
            self._bias[lane] = dict(params.logit_bias)
        self._seen.pop(lane, None)
        if params.has_penalty:
            self._seen[lane] = _SeenTokens(sequence.token_ids, sequence.num_prompt)

    def count(self, lanes: Int64s, token_ids: Int32s) -> None:
        """Remember drawn tokens where penalties need it."""
        if self._seen:
            for lane, token in zip(lanes.tolist(), token_ids.tolist(), strict=True):
                if lane in self._seen:
                    self._seen[lane].add(token)

    def gather(self, lanes: Int64s, *, forks: Int64s, positions: Int64s) -> SamplingBatch:
        row_lanes = lanes.tolist() if self._seen or self._bias else []
        return SamplingBatch(
            temperature=self._temperature[lanes],
            top_k=self._top_k[lanes],
            top_p=self._top_p[lanes],
            min_p=self._min_p[lanes],
            repetition_penalty=self._repetition_penalty[lanes],
            presence_penalty=self._presence_penalty[lanes],
            frequency_penalty=self._frequency_penalty[lanes],
            seed=self._seed[lanes],
            sequence=self._index[lanes] + forks,
            position=positions,
            num_logprobs=self._num_logprobs[lanes],
            seen=seen_rows(
                {
                    row: self._seen[lane].counts()
                    for row, lane in enumerate(row_lanes)
                    if lane in self._seen
                }
            ),
            bias=bias_rows(
                {row: self._bias[lane] for row, lane in enumerate(row_lanes) if lane in self._bias}
            ),
        )


class _SeenTokens:
    """Distinct tokens of one sequence and their numbers in its output, kept as arrays."""

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
