"""Computes the masks of all sequences with grammars in a step together.

    queries -> matchers -> read the last tokens -> one block of masks, one row per query, and
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

import numpy as np
from llguidance import LLExecutor

from trtc.protos.errors import UnavailableError
from trtc.protos.step import num_mask_words
from trtc.runtime.grammar.mask_source import SLOW_S, GrammarMasks, Reading
from trtc.runtime.requests.token_masks import MaskQueries, MaskQuery
from trtc.runtime.sampling.masks import UInt32s

_MAX_THREADS = 8
_EXTRA_S = 0.0005
"""Seconds that each further mask of a block may take."""


def num_threads() -> int:
    """Threads that compute masks: half of the CPUs, since CPU engines compute on all of them."""
    return max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))


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

    def begin(self, queries: MaskQueries) -> None:
        try:
            self._thread.submit(self._answer, queries)
        except RuntimeError:
            for one in queries:
                one.fail(UnavailableError("the engine is closed"))

    def close(self) -> None:
        """Drop queries that have not been started. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _answer(self, queries: MaskQueries) -> None:
        try:
            begin = time.perf_counter()
            asked, readings = self._read(queries)
            block, rows = self._fill(readings)
            seconds = time.perf_counter() - begin
            numbers = _num_computed(block, rows, readings)
            answered = list(zip(asked, rows, numbers, strict=True))
            if any([one.state.matcher.is_error() for one in readings]):  # noqa: C419
                is_right = [not _fails(*one) for one in zip(asked, readings, strict=True)]
                answered = list(itertools.compress(answered, is_right))
            if seconds > self._slow_s + len(readings) * _EXTRA_S:
                for query, _, _ in answered:
                    _compute_separately(query)
            queries.answer_from(block.data, answered)
        except BaseException as error:  # noqa: BLE001 (no sequence may wait for ever)
            for query in queries:
                if not query.is_answered:
                    query.fail(error)

    def _read(self, queries: MaskQueries) -> tuple[list[MaskQuery], list[Reading]]:
        """Queries, and for each its matcher, which has read all tokens. Other queries are
        answered: those past the end, and those with a token that the grammar does not allow."""
        asked: list[MaskQuery] = []
        readings: list[Reading] = []
        for query in queries:
            source: GrammarMasks = query.source  # type: ignore[assignment]
            reading = source.take_for(query)
            if reading is None:
                query.answer(source.ended)
                continue
            asked.append(query)
            readings.append(reading)
            reading.state.read += reading.rest
        unread = [(one.state.matcher, one.rest) for one in readings if one.rest]
        is_right = True
        while len(unread) > 1:
            read = self._rows.consume_token_par([(matcher, rest[0]) for matcher, rest in unread])
            is_right = is_right and all(read)
            unread = [(matcher, rest[1:]) for matcher, rest in unread if len(rest) > 1]
        for matcher, rest in unread:  # needs no other thread
            is_right = matcher.consume_tokens(list(rest)) and is_right
        if not is_right:
            right = [not _fails(*one) for one in zip(asked, readings, strict=True)]
            asked = list(itertools.compress(asked, right))
            readings = list(itertools.compress(readings, right))
        return asked, readings

    def _fill(self, readings: list[Reading]) -> tuple[UInt32s, Sequence[int]]:
        """Compute the masks, and return them with the first row of each reading."""
        if not any([one.drafts for one in readings]):  # noqa: C419 (half the time of a generator)
            block: UInt32s = np.empty((len(readings), self._num_words), np.uint32)
            self._fill_plain(list(enumerate(readings)), block)
            return block, range(len(readings))
        ends = list(itertools.accumulate(1 + len(one.drafts) for one in readings))
        rows = [0, *ends[:-1]]
        block = np.zeros((ends[-1], self._num_words), np.uint32)  # rows of forbidden drafts stay 0
        placed = list(zip(rows, readings, strict=True))
        self._fill_plain([one for one in placed if not one[1].drafts], block)
        placed.sort(key=_lexer)
        self._rows.unsafe_compute_mask_ptr_with_draft_token(
            [(one.state.matcher, row, list(one.drafts)) for row, one in placed if one.drafts],
            block.ctypes.data,
            block.strides[0],
            len(block),
        )
        return block, rows

    def _fill_plain(self, placed: list[tuple[int, Reading]], block: UInt32s) -> None:
        """Compute the masks of readings without drafts, given with their rows."""
        begin, size = block.ctypes.data, block.strides[0]
        if len(placed) == 1:  # needs no other thread
            ((row, one),) = placed
            one.state.matcher.unsafe_compute_mask_ptr(begin + row * size, size)
        elif placed:
            placed.sort(key=_lexer)
            matchers = [(one.state.matcher, row) for row, one in placed]
            self._rows.unsafe_compute_mask_ptr(matchers, begin, size, len(block))


def _lexer(placed: tuple[int, Reading]) -> int:
    """Sort key: the lexer of a matcher. A thread computes adjacent rows, so matchers that share a
    lexer, which is locked, do not wait for each other."""
    return placed[1].state.lexer


def _fails(query: MaskQuery, reading: Reading) -> bool:
    """Whether a matcher has failed, and with it its query."""
    if not reading.state.matcher.is_error():
        return False
    source: GrammarMasks = query.source  # type: ignore[assignment]
    query.fail(source.failure(reading.state))
    return True


def _compute_separately(query: MaskQuery) -> None:
    source: GrammarMasks = query.source  # type: ignore[assignment]
    source.is_slow = True
    source.take_back(query)


def _num_computed(block: UInt32s, rows: Sequence[int], readings: list[Reading]) -> list[int]:
    """How many drafts of each have masks: those up to the first that is forbidden, or exceeds a
    limit."""
    return [
        _num_drafts(block, row, one.drafts) if one.drafts else 0
        for row, one in zip(rows, readings, strict=True)
    ]


def _num_drafts(block: UInt32s, row: int, drafts: Sequence[int]) -> int:
    for at, token in enumerate(drafts):
        is_allowed = block[row + at, token >> 5] >> np.uint32(token & 31) & 1
        if not is_allowed or not block[row + at + 1].any():
            return at
    return len(drafts)
