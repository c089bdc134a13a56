"""Computes the masks of all sequences with grammars in a step together.

    questions -> matchers -> read the last tokens -> one block of masks, one row per question, and
                                                     one per draft

One thread does it; llguidance's own threads compute the rows without the GIL. After a slow block,
its requests are computed separately (`GrammarMasks.is_slow`), so that a grammar that is always slow
delays others only once.
"""

import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor

from trtc.protos.errors import UnavailableError
from trtc.protos.step import num_mask_words
from trtc.runtime.grammar.mask_source import SLOW_S, GrammarMasks, State
from trtc.runtime.requests.token_masks import MaskQuestion
from trtc.runtime.sampling.masks import UInt32s

_MAX_THREADS = 8
_EXTRA_S = 0.0005
"""Seconds that each further mask of a block may take."""


def num_threads() -> int:
    """Threads that compute masks: half of the CPUs, since CPU engines compute on all of them."""
    return max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))


class _Reading(NamedTuple):
    """A matcher whose mask is being computed."""

    question: MaskQuestion
    source: GrammarMasks
    state: State
    rest: list[int]
    drafts: Sequence[int]


def _lexer(reading: _Reading) -> int:
    """Sort key: the lexer of a matcher. A thread computes adjacent rows, so matchers that share a
    lexer, which is locked, do not wait for each other."""
    return id(reading.source.original)


class MaskComputer:
    """Computes masks for the grammars of one engine (implements MaskAnswerer)."""

    def __init__(self, vocab_size: int, slow_s: float = SLOW_S) -> None:
        """
        Args:
            slow_s: seconds from which on a block of one row counts as slow.
        """
        self._num_words = num_mask_words(vocab_size)
        self._slow_s = slow_s
        self._rows = LLExecutor(num_threads())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trtc-grammars")

    def begin(self, questions: Sequence[MaskQuestion]) -> None:
        try:
            self._thread.submit(self._answer, questions)
        except RuntimeError:
            for one in questions:
                one.fail(UnavailableError("the engine is closed"))

    def close(self) -> None:
        """Drop questions that have not been started. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _answer(self, questions: Sequence[MaskQuestion]) -> None:
        unanswered = dict.fromkeys(questions)
        try:
            begin = time.perf_counter()
            readings = self._read(unanswered)
            self._fill(readings, unanswered)
            seconds = time.perf_counter() - begin
            if seconds > self._slow_s + len(readings) * _EXTRA_S:
                for one in readings:
                    one.source.is_slow = True
        except BaseException as error:  # noqa: BLE001 (no sequence may wait for ever)
            for question in unanswered:
                question.fail(error)

    def _read(self, unanswered: dict[MaskQuestion, None]) -> list[_Reading]:
        """Matchers that have read all tokens, or have failed; those that share a lexer adjacent."""
        readings: list[_Reading] = []
        for question in list(unanswered):
            source: GrammarMasks = question.source  # type: ignore[assignment]
            reading = source.take_for(question)
            if reading is None:
                del unanswered[question]
                question.answer(source.ended)
            else:
                readings.append(_Reading(question, source, *reading))
        readings.sort(key=_lexer)
        unread = [(one.state.matcher, one.rest) for one in readings if one.rest]
        while len(unread) > 1:
            self._rows.consume_token_par([(matcher, rest[0]) for matcher, rest in unread])
            unread = [(matcher, rest[1:]) for matcher, rest in unread if len(rest) > 1]
        for matcher, rest in unread:  # needs no other thread
            matcher.consume_tokens(rest)
        for one in readings:
            one.state.read += one.rest
        return readings

    def _fill(self, readings: list[_Reading], unanswered: dict[MaskQuestion, None]) -> None:
        """Compute and answer."""
        block, first_rows = self._block(readings)
        valid = [
            (one, row)
            for one, row in zip(readings, first_rows, strict=True)
            if not one.state.matcher.is_error()
        ]
        plain = [(one.state.matcher, row) for one, row in valid if not one.drafts]
        drafted = [(one.state.matcher, row, list(one.drafts)) for one, row in valid if one.drafts]
        begin, size = block.ctypes.data, block.strides[0]
        if len(plain) == 1:  # needs no other thread
            ((matcher, row),) = plain
            matcher.unsafe_compute_mask_ptr(begin + row * size, size)
        elif plain:
            self._rows.unsafe_compute_mask_ptr(plain, begin, size, len(block))
        if drafted:
            self._rows.unsafe_compute_mask_ptr_with_draft_token(drafted, begin, size, len(block))
        masks = block.data
        for (question, source, state, _, drafts), row in zip(readings, first_rows, strict=True):
            del unanswered[question]
            if state.matcher.is_error():
                question.fail(source.failure(state))
            else:
                source.give_back(state)
                question.answer_from(masks, row, _num_computed(block, row, drafts))

    def _block(self, readings: list[_Reading]) -> tuple[UInt32s, Sequence[int]]:
        """Room for the masks, and the first row of each reading; those of drafts are 0."""
        if not any(one.drafts for one in readings):
            return np.empty((len(readings), self._num_words), np.uint32), range(len(readings))
        ends = list(itertools.accumulate(1 + len(one.drafts) for one in readings))
        return np.zeros((ends[-1], self._num_words), np.uint32), [0, *ends[:-1]]


def _num_computed(block: UInt32s, row: int, drafts: Sequence[int]) -> int:
    """How many drafts have masks: those up to the first that is forbidden, or exceeds a limit."""
    for at, token in enumerate(drafts):
        is_allowed = block[row + at, token >> 5] >> np.uint32(token & 31) & 1
        if not is_allowed or not block[row + at + 1].any():
            return at
    return len(drafts)
