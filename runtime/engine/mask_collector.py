"""Computes masks and biases of next tokens in other threads than the engine loop's.

    ask ──> answerers, while the executor computes logits ──> collect ──> draw

The masks of a step's sequences are requested at once: each answerer gets one list of queries. A
step waits for late masks: if it has sequences without masks, until their logits are computed, so
that they lose no time, else briefly. Then the sequence of a late mask is held: it skips steps until
the mask is ready. If the sequence's state cannot be kept meanwhile, the step waits for the mask; if
the step would draw nothing at all, it waits for the first mask.

A sequence with drafts has a mask for each of its rows, up to the first draft that its masks forbid:

    known d1   d2        d3
    mask  mask forbidden          the draws are t1, t2, ...; t1 counts, and t2 if d1 is t1
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from trtc.protos.errors import TrtcError
from trtc.runtime.engine.mask_answers import Answers, AnswerThreads, Queries, Query, RowEdit
from trtc.runtime.engine.step_builder import MaskedRows
from trtc.runtime.requests.token_masks import (
    MaskAnswerer,
    each_source,
)
from trtc.runtime.sampling.masks import RowMasks, UInt32s, check_allows_any
from trtc.runtime.scheduling.sequence import Sequence as RunningSequence
from trtc.runtime.scheduling.sequence import Status

_GRACE_S = 0.005
"""Seconds that a step waits for masks: less than most steps take, and more than most masks take."""
_LEAST_GRACE_S = 0.0002
_LEAST_GRACE = 0.02
"""Share of a step's time that sequences without masks wait at least: a small delay, while a held
sequence loses a whole step."""
_FIRST_MASK_S = 0.05
"""Seconds that a step with nothing else to draw waits for its first mask. The engine loop is
blocked meanwhile and admits no requests."""
_MOST_ENDED = 8
"""About so many sequences may have ended before they are forgotten."""
_MAX_THREADS = 4
"""More than one, so that a slow answer does not delay the others."""


class Collected(NamedTuple):
    """Masks and biases of a step at the time of its draw."""

    masks: RowMasks | None
    late: list[RunningSequence]
    """Sequences whose masks are not ready."""
    failures: dict[RunningSequence, TrtcError]
    """Errors of masks that could not be computed."""
    biases: Mapping[int, Mapping[int, float]] = MappingProxyType({})
    """Row -> token id -> bias of its logit."""
    last_rows: Sequence[int] = ()
    """Rows that verify a draft, which must be rejected: the rows behind have no masks."""


class _Asked:
    """What was last asked about a sequence."""

    __slots__ = ("at", "drafts", "is_open", "queries")

    def __init__(self, queries: list[Query]) -> None:
        self.queries = queries
        """One query for each source of the request's masks."""
        self.drafts: Sequence[int] = ()
        self.at = 0.0
        """time.perf_counter()"""
        self.is_open = False
        """Whether the answers have not been collected."""

    @property
    def num_output(self) -> int:
        """Of the sequence, when its queries were asked."""
        return self.queries[0].num_output

    @property
    def is_answered(self) -> bool:
        # Read for every sequence of a step: a generator would take three times as long.
        for one in self.queries:  # noqa: SIM110
            if not one.is_answered:
                return False
        return True


class MaskCollector:
    """The masks of one engine's sequences. Not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._answers = Answers()
        self._threads = AnswerThreads(min(_MAX_THREADS, os.cpu_count() or 1))
        self._asked: dict[RunningSequence, _Asked] = {}
        self._num_open = 0

    @property
    def is_waiting(self) -> bool:
        """Whether masks have been requested that are not collected."""
        return self._num_open > 0

    def ask(self, rows: Iterable[MaskedRows]) -> None:
        """Request the masks of sequences whose tokens are all known; `collect` returns them."""
        begun: dict[MaskAnswerer, Queries] = {}
        now = time.perf_counter()
        for sequence, _, _, drafts in rows:
            asked = self._asked.get(sequence)
            if asked is None:
                asked = self._asked[sequence] = _Asked(self._queries(sequence, drafts))
            elif not asked.is_open:
                asked.queries = [one.next(drafts) for one in asked.queries]
            elif asked.num_output != sequence.num_output:
                asked.queries = self._queries(sequence, drafts)
            else:
                continue
            self._num_open += not asked.is_open
            asked.is_open, asked.at, asked.drafts = True, now, drafts
            for query in asked.queries:
                answerer = getattr(query.source, "answerer", None) or self._threads
                if answerer not in begun:
                    begun[answerer] = Queries(self._answers)
                begun[answerer].append(query)
        for answerer, queries in begun.items():
            answerer.begin(queries)

    def collect(
        self,
        rows: Sequence[MaskedRows],
        *,
        may_be_late: bool = True,
        free_s: float | None = None,
    ) -> Collected:
        """The masks of a step that is drawn now. Requests the masks that were not requested before.

        Args:
            rows: of sequences that have not ended.
            free_s: seconds, from the request for masks, that sequences without masks in the step
                wait for their logits anyway. None: there are no such sequences.
        """
        self.ask(rows)
        asked_of_rows = [self._asked[one.sequence] for one in rows]
        self._wait(asked_of_rows, may_be_late, free_s)
        found = FoundEdits()
        late: list[RunningSequence] = []
        failures: dict[RunningSequence, TrtcError] = {}
        for one, asked in zip(rows, asked_of_rows, strict=True):
            if not asked.is_answered:
                late.append(one.sequence)
                continue
            asked.is_open = False
            try:
                edit = _common(asked.queries, 0)
            except TrtcError as error:
                failures[one.sequence] = error
                continue
            if one.drafts:
                found.add_drafted(one, _edits_after(edit, asked, one.drafts))
            else:
                found.add(edit, one.first, one.number)
        self._num_open -= len(rows) - len(late)
        if len(self._asked) > len(rows) + _MOST_ENDED:
            self._forget()
        return Collected(found.masks(), late, failures, found.biases, found.last_rows)

    def _forget(self) -> None:
        """Forget sequences that have ended."""
        for sequence in [one for one in self._asked if one.status is Status.FINISHED]:
            self._num_open -= self._asked.pop(sequence).is_open

    def release(self) -> None:
        """Release held sequences whose masks are ready, and forget those that have ended."""
        self._forget()
        for sequence, asked in self._asked.items():
            if asked.is_open and asked.is_answered:
                sequence.is_held = False

    def wait(self, seconds: float) -> None:
        """Wait until a mask is ready, at most `seconds`."""
        asked = [one for one in self._asked.values() if one.is_open]
        self._answers.wait_until(lambda: any(one.is_answered for one in asked), seconds)

    def close(self) -> None:
        """Drop all requests for masks, and end the threads."""
        self._asked.clear()
        self._num_open = 0
        self._threads.close()

    def _wait(self, asked: list[_Asked], may_be_late: bool, free_s: float | None) -> None:
        queries = [each for one in asked for each in one.queries]
        self._answers.wait_for_all(queries, _grace(asked, free_s) if may_be_late else None)
        if free_s is None and asked and not any(one.is_answered for one in asked):
            self._answers.wait_until(lambda: any(one.is_answered for one in asked), _FIRST_MASK_S)

    def _queries(self, sequence: RunningSequence, drafts: Sequence[int]) -> list[Query]:
        masks = sequence.request.masks
        assert masks is not None
        return [
            Query(source, sequence, self._answers, self._vocab_size, drafts)
            for source in each_source(masks)
        ]


def _grace(asked: list[_Asked], free_s: float | None) -> float:
    """Seconds to wait for masks from now on."""
    if free_s is None or not asked:
        return _GRACE_S
    left = max(one.at for one in asked) + free_s - time.perf_counter()
    return min(max(left, _LEAST_GRACE_S, _LEAST_GRACE * free_s), _GRACE_S)


class FoundEdits:
    """The edits of a step's rows, as they are found, in order of the rows."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._edits: list[RowEdit] = []
        self.biases: dict[int, Mapping[int, float]] = {}
        self.last_rows: list[int] = []

    def add(self, edit: RowEdit, first: int, number: int = 1) -> None:
        if edit.masks is not None:
            self._rows.append(first)
            self._edits.append(edit)
            for row in range(first + 1, first + number):
                self._rows.append(row)
                self._edits.append(edit)
        if edit.bias:
            self.biases |= dict.fromkeys(range(first, first + number), edit.bias)

    def add_drafted(self, rows: MaskedRows, edits: Sequence[RowEdit]) -> None:
        """Add a sequence with drafts, of which the first len(edits) - 1 have edits."""
        for row, edit in enumerate(edits, rows.first):
            self.add(edit, row)
        if len(edits) < rows.number:
            self.last_rows.append(rows.first + len(edits) - 1)

    def masks(self) -> RowMasks | None:
        if not self._edits:
            return None
        return RowMasks(np.array(self._rows, np.int32), _joined(self._edits))


def _edits_after(first: RowEdit, asked: _Asked, drafts: Sequence[int]) -> list[RowEdit]:
    """The edits of a sequence's rows, up to the first draft that is forbidden, or has none.

    Args:
        drafts: of the step. A sequence that was held may have been asked about others.
    """
    edits = [first]
    for number, (draft, of_query) in enumerate(zip(drafts, asked.drafts, strict=False), 1):
        if draft != of_query or not edits[-1].allows(draft):
            break
        if any(len(one.edits) <= number for one in asked.queries):
            break
        try:
            edits.append(_common(asked.queries, number))
        except TrtcError:
            break  # the sequence fails when it gets there
    return edits


def _common(queries: list[Query], number: int) -> RowEdit:
    """The edit after `number` drafts: the intersection of the answers' masks, and the sums of their
    biases.

    Raises:
        TrtcError: an answer failed, or no token is allowed by all.
    """
    common: RowEdit | None = None
    for one in queries:
        if one.error is not None:
            raise one.error
        edit = one.edits[number]
        common = edit if common is None else _intersection(common, edit)
    assert common is not None
    return common


def _intersection(one: RowEdit, other: RowEdit) -> RowEdit:
    bias = dict(one.bias)
    for token, value in other.bias.items():
        bias[token] = bias.get(token, 0.0) + value
    if one.masks is None or other.masks is None:
        masked = other if one.masks is None else one
        return masked._replace(bias=bias)
    words = np.asarray(one.masks)[one.row] & np.asarray(other.masks)[other.row]
    check_allows_any(words)
    return RowEdit(words[None].data, 0, bias)


def _joined(found: list[RowEdit]) -> UInt32s:
    """[len(found), words]; not a copy if they are already contiguous, as in most steps."""
    masks = found[0].masks
    words: UInt32s = np.asarray(masks)
    rows = [one.row for one in found if one.masks is masks]
    if len(rows) == len(found):
        return words if rows == list(range(len(words))) else words[rows]
    return np.array([np.asarray(one.masks)[one.row] for one in found])
