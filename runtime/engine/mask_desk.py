"""Computes masks and biases of next tokens in other threads than the engine loop's.

    ask ──> answerers, while the executor computes logits ──> collect ──> draw

The masks of a step's sequences are requested at once: each answerer gets one list of questions. A
step waits for late masks: if it has sequences without masks, until their logits are computed, so
that they lose no time, else briefly. Then the sequence of a late mask is held: it skips steps until
the mask is ready. If the sequence's state cannot be kept meanwhile, the step waits for the mask; if
the step would draw nothing at all, it waits for the first mask.
"""

import os
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from trtc.protos.errors import TrtcError
from trtc.runtime.engine.mask_answers import Answers, AnswerThreads, Question
from trtc.runtime.engine.step_builder import MaskedRows
from trtc.runtime.requests.token_masks import (
    JointMasks,
    MaskAnswerer,
    MaskQuestion,
    TokenMasks,
    each_source,
)
from trtc.runtime.sampling.masks import RowMasks, UInt32s, check_allows_any
from trtc.runtime.scheduling.sequence import Sequence, Status

_GRACE_S = 0.005
"""Seconds that a step waits for masks: less than most steps take, and more than most masks take."""
_LEAST_GRACE_S = 0.0002
_LEAST_GRACE = 0.02
"""Share of a step's time that sequences without masks wait at least: a small delay, while a held
sequence loses a whole step."""
_FIRST_MASK_S = 0.05
"""Seconds that a step with nothing else to draw waits for its first mask. The engine loop is
blocked meanwhile and admits no requests."""
_MAX_THREADS = 4
"""More than one, so that a slow answer does not delay the others."""


class Collected(NamedTuple):
    """Masks and biases of a step at the time of its draw."""

    masks: RowMasks | None
    late: list[Sequence]
    """Sequences whose masks are not ready."""
    failures: dict[Sequence, TrtcError]
    """Errors of masks that could not be computed."""
    biases: Mapping[int, Mapping[int, float]] = MappingProxyType({})
    """Row -> token id -> bias of its logit."""


class _Asked(NamedTuple):
    num_output: int
    at: float
    """time.perf_counter()"""
    questions: list[Question]
    """One question for each source of the request's masks."""

    @property
    def is_answered(self) -> bool:
        # Read for every sequence of a step: a generator would take three times as long.
        for one in self.questions:  # noqa: SIM110
            if not one.is_answered:
                return False
        return True


class _Mask(NamedTuple):
    """One row of an array of masks."""

    masks: memoryview
    row: int


class MaskDesk:
    """The masks of one engine's sequences. Not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._answers = Answers()
        self._threads = AnswerThreads(min(_MAX_THREADS, os.cpu_count() or 1))
        self._asked: dict[Sequence, _Asked] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether masks have been requested that are not collected."""
        return bool(self._asked)

    def ask(self, rows: Iterable[MaskedRows]) -> None:
        """Request the masks of sequences whose tokens are all known; `collect` returns them."""
        begun: dict[MaskAnswerer, list[MaskQuestion]] = {}
        now = time.perf_counter()
        for sequence, _, _ in rows:
            num_output = sequence.num_output
            asked = self._asked.get(sequence)
            if asked is None or asked.num_output != num_output:
                asked = _Asked(num_output, now, self._questions(sequence))
                self._asked[sequence] = asked
                for one in asked.questions:
                    begun.setdefault(self._answerer(one.source), []).append(one)
        for answerer, questions in begun.items():
            answerer.begin(questions)

    def collect(
        self,
        rows: Iterable[MaskedRows],
        *,
        may_be_late: bool = True,
        free_s: float | None = None,
    ) -> Collected:
        """The masks of a step that is drawn now, for sequences that have not ended. Requests the
        masks that were not requested before.

        Args:
            free_s: seconds, from the request for masks, that sequences without masks in the step
                wait for their logits anyway. None: there are no such sequences.
        """
        running = [one for one in rows if one.sequence.lanes]
        self.ask(running)
        self._wait([self._asked[one.sequence] for one in running], may_be_late, free_s)
        numbers: list[int] = []
        found: list[_Mask] = []
        biases: dict[int, Mapping[int, float]] = {}
        late: list[Sequence] = []
        failures: dict[Sequence, TrtcError] = {}
        for sequence, first, number in running:
            asked = self._asked[sequence]
            if not asked.is_answered:
                late.append(sequence)
                continue
            del self._asked[sequence]
            try:
                mask, bias = _common(asked.questions)
            except TrtcError as error:
                failures[sequence] = error
                continue
            rows_of = range(first, first + number)
            if mask is not None:
                numbers += rows_of
                found += [mask] * number
            if bias:
                biases |= dict.fromkeys(rows_of, bias)
        masks = RowMasks(np.array(numbers, np.int32), _joined(found)) if found else None
        return Collected(masks, late, failures, biases)

    def release(self) -> None:
        """Release held sequences whose masks are ready, and forget those that have ended."""
        for sequence, asked in list(self._asked.items()):
            if sequence.status is Status.FINISHED:
                del self._asked[sequence]
            elif asked.is_answered:
                sequence.is_held = False

    def wait(self, seconds: float) -> None:
        """Wait until a mask is ready, at most `seconds`."""
        asked = self._asked.values()
        self._answers.wait_until(lambda: any(one.is_answered for one in asked), seconds)

    def close(self) -> None:
        """Drop all requests for masks, and end the threads."""
        self._asked.clear()
        self._threads.close()

    def _wait(self, asked: list[_Asked], may_be_late: bool, free_s: float | None) -> None:
        questions = [each for one in asked for each in one.questions]
        self._answers.wait_for_all(questions, _grace(asked, free_s) if may_be_late else None)
        if free_s is None and asked and not any(one.is_answered for one in asked):
            self._answers.wait_until(lambda: any(one.is_answered for one in asked), _FIRST_MASK_S)

    def _questions(self, sequence: Sequence) -> list[Question]:
        masks = sequence.request.masks
        assert masks is not None
        return [
            Question(source, sequence, self._answers, self._vocab_size)
            for source in each_source(masks)
        ]

    def _answerer(self, source: TokenMasks | JointMasks) -> MaskAnswerer:
        found: MaskAnswerer | None = getattr(source, "answerer", None)
        return self._threads if found is None else found


def _grace(asked: list[_Asked], free_s: float | None) -> float:
    """Seconds to wait for masks from now on."""
    if free_s is None or not asked:
        return _GRACE_S
    left = max(one.at for one in asked) + free_s - time.perf_counter()
    return min(max(left, _LEAST_GRACE_S, _LEAST_GRACE * free_s), _GRACE_S)


def _common(questions: list[Question]) -> tuple[_Mask | None, Mapping[int, float]]:
    """The intersection of the answers' masks, and the sums of their biases.

    Raises:
        TrtcError: an answer failed, or no token is allowed by all.
    """
    for one in questions:
        if one.error is not None:
            raise one.error
    (first, *others) = questions
    mask = None if first.masks is None else _Mask(first.masks, first.row)
    if not others:
        return mask, first.bias
    sums = dict(first.bias)
    for other in others:
        for token, value in other.bias.items():
            sums[token] = sums.get(token, 0.0) + value
        if other.masks is not None:
            added = _Mask(other.masks, other.row)
            mask = added if mask is None else _intersection(mask, added)
    return mask, sums


def _intersection(one: _Mask, other: _Mask) -> _Mask:
    words = np.asarray(one.masks)[one.row] & np.asarray(other.masks)[other.row]
    check_allows_any(words)
    return _Mask(words[None].data, 0)


def _joined(found: list[_Mask]) -> UInt32s:
    """[len(found), words]; not a copy if they are already contiguous, as in most steps."""
    masks = found[0].masks
    words: UInt32s
    if all(one.masks is masks for one in found):
        words, rows = np.asarray(masks), [one.row for one in found]
        return words if rows == list(range(len(words))) else words[rows]
    words = np.array([np.asarray(one.masks)[one.row] for one in found])
    return words
