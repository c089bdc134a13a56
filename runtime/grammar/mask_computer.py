"""Computes the masks of all sequences with grammars that a step draws, together.

    questions -> matchers -> read the last tokens -> one block of masks, a row a question

One thread does it, and llguidance's own threads compute the rows without the interpreter's lock.
A block that took long makes its requests be asked about alone (`GrammarMasks.is_slow`), so that
one that is always slow keeps others waiting once.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher

from trtc.protos.errors import UnavailableError
from trtc.protos.step import num_mask_words
from trtc.runtime.grammar.mask_source import SLOW_S, GrammarMasks, State
from trtc.runtime.requests.token_masks import MaskQuestion

_MAX_THREADS = 8
_EXTRA_S = 0.0005
"""Seconds that each further mask of a block may take."""


def num_threads() -> int:
    """That compute masks: half of the CPUs, since on many machines the executor computes on all of
    them."""
    return max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))


class _Reading(NamedTuple):
    """A matcher on its way to a mask."""

    question: MaskQuestion
    source: GrammarMasks
    state: State
    rest: list[int]

    @property
    def matcher(self) -> LLMatcher:
        return self.state.matcher


def _lexer(reading: _Reading) -> int:
    """Which lexer it reads with. A thread computes neighbours, so that those with one lexer, which
    is locked, do not wait for each other."""
    return id(reading.source.original)


class MaskComputer:
    """Answers about the grammars of one engine (implements MaskAnswerer)."""

    def __init__(self, vocab_size: int, slow_s: float = SLOW_S) -> None:
        """
        Args:
            slow_s: seconds after which a block of one row has taken long.
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
        """Questions that have not been looked at are not answered. Idempotent."""
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
        """Matchers that have read all, unless they have failed."""
        readings: list[_Reading] = []
        for question in list(unanswered):
            source = cast(GrammarMasks, question.source)
            reading = source.take(list(question.output_ids))
            if reading is None:
                del unanswered[question]
                question.answer(source.ended)
            else:
                readings.append(_Reading(question, source, *reading))
        singles = [one for one in readings if len(one.rest) == 1]
        if len(singles) > 1:
            by_lexer = sorted(singles, key=_lexer)
            self._rows.consume_token_par([(one.matcher, one.rest[0]) for one in by_lexer])
        for one in readings:
            if len(one.rest) > 1 or len(singles) == 1:
                one.matcher.consume_tokens(one.rest)
            one.state.read += one.rest
        return readings

    def _fill(self, readings: list[_Reading], unanswered: dict[MaskQuestion, None]) -> None:
        """Compute and answer."""
        block = np.empty((len(readings), self._num_words), np.uint32)
        rows = [(one, row) for row, one in enumerate(readings) if not one.matcher.is_error()]
        rows.sort(key=lambda one: _lexer(one[0]))
        matchers = [(one.matcher, row) for one, row in rows]
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
