"""Computes masks and biases of requests' next tokens, on threads of its own.

    ask ──> TokenMasks.allowed, while the executor computes logits ──> collect ──> draw

A mask that is not ready when the logits are is waited for briefly. Then its sequence is held: it
skips steps until the mask is ready. Where its state cannot be kept meanwhile, the step waits.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from trtc.protos.errors import InvalidRequestError, TrtcError
from trtc.runtime.requests.request import TokenEdit, TokenMasks
from trtc.runtime.sampling.masks import RowMasks, UInt32s, check_bias, read_mask
from trtc.runtime.scheduling.sequence import Sequence, Status

_GRACE_S = 0.005
"""Seconds that a step waits for masks: less than most steps take, and more than most masks do."""
_MAX_THREADS = 4
"""So that one slow answer does not keep others waiting."""


class MaskedRows(NamedTuple):
    """Rows of a step that draw a sequence's next token under a mask."""

    sequence: Sequence
    first: int
    number: int
    """More than one where a request forks."""


class Collected(NamedTuple):
    """What is known of a step's masks when it is drawn."""

    masks: RowMasks | None
    late: list[Sequence]
    """Their masks are not ready."""
    failures: dict[Sequence, TrtcError]
    """Errors of masks that could not be computed."""
    biases: Mapping[int, Mapping[int, float]] = MappingProxyType({})
    """Row -> token id -> what is added to its logit."""


class _Edit(NamedTuple):
    """A TokenEdit that was checked."""

    words: UInt32s | None
    bias: Mapping[int, float]


class _Asked(NamedTuple):
    num_output: int
    answer: "Future[_Edit]"


class MaskDesk:
    """The masks of one engine's sequences; one thread uses it."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._threads: ThreadPoolExecutor | None = None
        """None: no masks have been requested yet."""
        self._asked: dict[Sequence, _Asked] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether masks have been requested that are not collected."""
        return bool(self._asked)

    def ask(self, rows: Iterable[MaskedRows]) -> None:
        """Request the masks of sequences whose tokens are all known; `collect` gives them."""
        for sequence, _, _ in rows:
            asked = self._asked.get(sequence)
            if asked is None or asked.num_output != sequence.num_output:
                self._asked[sequence] = self._begin(sequence)

    def collect(self, rows: Iterable[MaskedRows], *, may_be_late: bool = True) -> Collected:
        """The masks of a step that is drawn now, of those sequences that have not ended. Masks that
        were not requested yet are."""
        running = [one for one in rows if one.sequence.lanes]
        self.ask(running)
        answers = [self._asked[one.sequence].answer for one in running]
        wait(answers, _GRACE_S if may_be_late else None)
        numbers: list[int] = []
        words: list[UInt32s] = []
        biases: dict[int, Mapping[int, float]] = {}
        late: list[Sequence] = []
        failures: dict[Sequence, TrtcError] = {}
        for sequence, first, number in running:
            answer = self._asked[sequence].answer
            if not answer.done():
                late.append(sequence)
                continue
            del self._asked[sequence]
            error = answer.exception()
            if error is not None:
                failures[sequence] = _refusal(error)
                continue
            edit, rows_of = answer.result(), range(first, first + number)
            if edit.words is not None:
                numbers += rows_of
                words += [edit.words] * number
            if edit.bias:
                biases |= dict.fromkeys(rows_of, edit.bias)
        masks = RowMasks(np.array(numbers, np.int32), np.array(words)) if words else None
        return Collected(masks, late, failures, biases)

    def release(self) -> None:
        """Release held sequences whose masks are ready, and forget those that have ended."""
        for sequence, asked in list(self._asked.items()):
            if sequence.status is Status.FINISHED:
                del self._asked[sequence]
            elif asked.answer.done():
                sequence.is_held = False

    def wait(self, seconds: float) -> None:
        """Wait until a mask is ready, or for so many seconds."""
        wait([one.answer for one in self._asked.values()], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Drop all requests for masks."""
        self._asked.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, sequence: Sequence) -> _Asked:
        if self._threads is None:
            number = min(_MAX_THREADS, os.cpu_count() or 1)
            self._threads = ThreadPoolExecutor(number, thread_name_prefix="trtc-masks")
        source = sequence.request.masks
        assert source is not None
        output = sequence.token_ids[sequence.num_prompt :]
        return _Asked(len(output), self._threads.submit(self._answer, source, output))

    def _answer(self, source: TokenMasks, output: list[int]) -> _Edit:
        answer = source.allowed(output)
        edit = answer if isinstance(answer, TokenEdit) else TokenEdit(answer)
        words = None if edit.mask is None else read_mask(edit.mask, self._vocab_size)
        check_bias(edit.bias, self._vocab_size)
        return _Edit(words, edit.bias)


def _refusal(error: BaseException) -> TrtcError:
    if isinstance(error, TrtcError):
        return error
    refusal = InvalidRequestError(
        f"raised {type(error).__name__}: {error}",
        field="masks",
        remedy="Give masks for every output that they allow",
    )
    refusal.__cause__ = error
    return refusal
