"""Requests for masks of sequences' next tokens, and waiting for their answers."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple

from trtc.protos.errors import InvalidRequestError, TrtcError
from trtc.runtime.requests.token_masks import (
    JointMasks,
    MaskQueries,
    MaskQuery,
    TokenEdit,
    TokenMasks,
)
from trtc.runtime.sampling.masks import check_bias, read_mask
from trtc.runtime.scheduling.sequence import Sequence as RunningSequence

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


class RowEdit(NamedTuple):
    """Changes to the logits of one row's draw."""

    masks: memoryview | None
    """[rows, ceil(vocab / 32)] 32-bit words. None: every token is allowed."""
    row: int
    """Row of `masks`."""
    bias: Mapping[int, float] = _NO_BIAS

    def allows(self, token: int) -> bool:
        if self.masks is None:
            return True
        word: int = self.masks[self.row, token >> 5]
        return bool(word >> (token & 31) & 1)


_UNMASKED = (RowEdit(None, 0),)


class Answers:
    """Lets one thread wait for answers of others: the last answer wakes it, once."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._num_awaited = 0
        self._looks_at_each = False

    def wait_for_all(self, queries: Iterable["Query"], seconds: float | None) -> None:
        with self._changed:
            awaited = [one for one in queries if not one.is_answered]
            for one in awaited:
                one.is_awaited = True
            self._num_awaited = len(awaited)
            self._changed.wait_for(lambda: self._num_awaited == 0, seconds)
            for one in awaited:
                one.is_awaited = False

    def wait_until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until `holds()`, which is checked after each answer, or for `seconds`."""
        with self._changed:
            self._looks_at_each = True
            self._changed.wait_for(holds, seconds)
            self._looks_at_each = False

    def take(self, queries: Iterable["Query"]) -> None:
        """Mark queries as answered."""
        with self._changed:
            before = self._num_awaited
            for query in queries:
                query.is_answered = True
                self._num_awaited -= query.is_awaited
            if self._looks_at_each or self._num_awaited == 0 < before:
                self._changed.notify_all()


class Query:
    """A request for the mask of one sequence's next token, and of those after its drafts
    (implements MaskQuery)."""

    __slots__ = (
        "_answers",
        "_sequence",
        "_vocab_size",
        "drafts",
        "edits",
        "error",
        "is_answered",
        "is_awaited",
        "memo",
        "new_ids",
        "num_output",
        "source",
    )

    def __init__(
        self,
        source: TokenMasks | JointMasks,
        sequence: RunningSequence,
        answers: Answers,
        vocab_size: int,
        drafts: Sequence[int] = (),
    ) -> None:
        self.source = source
        self._sequence = sequence
        self.num_output = sequence.num_output
        self.new_ids: Sequence[int] = ()
        self.drafts = drafts
        self.memo: object = None
        self.edits: Sequence[RowEdit] = ()
        """The answer: for the next token, and after each of the first drafts."""
        self.error: TrtcError | None = None
        self.is_answered = False
        """Like `is_awaited`, changed under the lock of the answers."""
        self.is_awaited = False
        self._answers = answers
        self._vocab_size = vocab_size

    def next(self, drafts: Sequence[int]) -> "Query":
        """The query about the sequence's output of now: this one, if its answerer has answered
        and keeps something for the sequence."""
        if self.memo is None or not self.is_answered:
            return Query(self.source, self._sequence, self._answers, self._vocab_size, drafts)
        sequence = self._sequence
        self.new_ids = sequence.token_ids[sequence.num_prompt + self.num_output :]
        self.num_output += len(self.new_ids)
        self.drafts = drafts
        self.is_answered = False
        return self

    @property
    def output_ids(self) -> list[int]:
        return self.output_from(0)

    def output_from(self, start: int) -> list[int]:
        first = self._sequence.num_prompt
        return self._sequence.token_ids[first + start : first + self.num_output]

    def answer(self, edit: bytes | TokenEdit) -> None:
        self.answer_each(iter((edit,)))

    def answer_each(self, edits: Iterator[bytes | TokenEdit]) -> None:
        try:
            found = [self._checked(next(edits))]
        except Exception as error:  # noqa: BLE001 (whatever is wrong with an answer ends its request)
            self.fail(error)
            return
        with contextlib.suppress(Exception):  # the sequence may never get there
            for token in self.drafts:
                if not found[-1].allows(token):
                    break
                found.append(self._checked(next(edits)))
        self.edits = found
        self._answers.take((self,))

    def _checked(self, edit: bytes | TokenEdit) -> RowEdit:
        edit = edit if isinstance(edit, TokenEdit) else TokenEdit(edit)
        check_bias(edit.bias, self._vocab_size)
        if edit.mask is None:
            return RowEdit(None, 0, edit.bias)
        return RowEdit(read_mask(edit.mask, self._vocab_size)[None].data, 0, edit.bias)

    def fail(self, error: BaseException) -> None:
        self.error = _refusal(error)
        self._answers.take((self,))


class Queries(list[Query]):
    """Those of a step that one answerer answers (implements MaskQueries)."""

    def __init__(self, answers: Answers, queries: Iterable[Query] = ()) -> None:
        super().__init__(queries)
        self._answers = answers

    def answer_from(
        self, masks: memoryview, answered: Iterable[tuple[MaskQuery, int, int]]
    ) -> None:
        taken: list[Query] = []
        for query, row, num_drafts in answered:
            assert isinstance(query, Query)
            query.edits = (RowEdit(masks, row),)
            if num_drafts:
                query.edits = [RowEdit(masks, row + at) for at in range(num_drafts + 1)]
            taken.append(query)
        self._answers.take(taken)

    def answer_unmasked(self, answered: Iterable[MaskQuery]) -> None:
        taken: list[Query] = []
        for query in answered:
            assert isinstance(query, Query)
            query.edits = _UNMASKED * (len(query.drafts) + 1)
            taken.append(query)
        if taken:
            self._answers.take(taken)


class AnswerThreads:
    """Calls TokenMasks in threads, one sequence at a time (implements MaskAnswerer)."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._threads: ThreadPoolExecutor | None = None
        """None: not used yet."""

    def begin(self, queries: MaskQueries) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._number, thread_name_prefix="trtc-masks")
        for query in queries:
            self._threads.submit(_ask, query)

    def close(self) -> None:
        """Drop the queries that have not been started."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _ask(query: MaskQuery) -> None:
    try:
        query.answer_each(edits_of(query))
    except BaseException as error:  # noqa: BLE001 (a caller's code: whatever it raises is its answer)
        query.fail(error)


def edits_of(query: MaskQuery) -> Iterator[bytes | TokenEdit]:
    """What a TokenMasks answers: after the output, and after each of its drafts."""
    source = query.source
    output, drafts = list(query.output_ids), list(query.drafts)
    for number in range(len(drafts) + 1):
        yield source.allowed(output + drafts[:number])  # type: ignore[union-attr]


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
