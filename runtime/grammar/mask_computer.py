"""Computes the masks of all sequences with grammars in a step together.

    questions -> matchers -> read the last tokens -> one block of masks, one row per question

One thread does it; llguidance's own threads compute the rows without the GIL. After a slow block,
its requests are computed separately (`GrammarMasks.is_slow`), so that a grammar that is always slow
delays others only once.
"""

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
        singles = [(one.state.matcher, one.rest[0]) for one in readings if len(one.rest) == 1]
        if len(singles) > 1:
            self._rows.consume_token_par(singles)
        for _, _, state, rest in readings:
            if len(rest) > 1 or len(singles) == 1:
                state.matcher.consume_tokens(rest)
            state.read += rest
        return readings

    def _fill(self, readings: list[_Reading], unanswered: dict[MaskQuestion, None]) -> None:
        """Compute and answer."""
        block = np.empty((len(readings), self._num_words), np.uint32)
        matchers = [
            (one.state.matcher, row)
            for row, one in enumerate(readings)
            if not one.state.matcher.is_error()
        ]
        begin, size = block.ctypes.data, block.strides[0]
        if len(matchers) == 1:  # needs no other thread
            ((matcher, row),) = matchers
            matcher.unsafe_compute_mask_ptr(begin + row * size, size)
        elif matchers:
            self._rows.unsafe_compute_mask_ptr(matchers, begin, size, len(block))
        masks = block.data
        for row, (question, source, state, _) in enumerate(readings):
            del unanswered[question]
            if state.matcher.is_error():
                question.fail(source.failure(state))
            else:
                source.give_back(state)
                question.answer_from(masks, row)
