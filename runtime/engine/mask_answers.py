"""Requests for masks of sequences' next tokens, and waiting for their answers."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from trtc.protos.errors import InvalidRequestError, TrtcError
from trtc.runtime.requests.token_masks import JointMasks, MaskQuestion, TokenEdit, TokenMasks
from trtc.runtime.sampling.masks import check_bias, read_mask
from trtc.runtime.scheduling.sequence import Sequence as RunningSequence

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


class Answers:
    """Lets one thread wait for answers of others: the last answer wakes it, once."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._num_awaited = 0
        self._looks_at_each = False

    def wait_for_all(self, questions: Iterable["Question"], seconds: float | None) -> None:
        with self._changed:
            awaited = [one for one in questions if not one.is_answered]
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

    def take(self, question: "Question") -> None:
        """Mark a question as answered."""
        with self._changed:
            question.is_answered = True
            self._num_awaited -= question.is_awaited
            if self._looks_at_each or (question.is_awaited and self._num_awaited == 0):
                self._changed.notify_all()


class Question:
    """A request for the mask of one sequence's next token (implements MaskQuestion)."""

    __slots__ = (
        "_answers",
        "_sequence",
        "_vocab_size",
        "bias",
        "error",
        "is_answered",
        "is_awaited",
        "masks",
        "num_output",
        "row",
        "sequence_key",
        "source",
    )

    def __init__(
        self,
        source: TokenMasks | JointMasks,
        sequence: RunningSequence,
        answers: Answers,
        vocab_size: int,
    ) -> None:
        self.source = source
        self.sequence_key = sequence.number, sequence.index
        self._sequence = sequence
        self.num_output = sequence.num_output
        self.masks: memoryview | None = None
        """[rows, ceil(vocab / 32)] 32-bit words; row `row` is the answer. None: every token is
        allowed."""
        self.row = 0
        self.bias = _NO_BIAS
        self.error: TrtcError | None = None
        self.is_answered = False
        """Like `is_awaited`, changed under the lock of the answers."""
        self.is_awaited = False
        self._answers = answers
        self._vocab_size = vocab_size

    @property
    def output_ids(self) -> list[int]:
        first = self._sequence.num_prompt
        return self._sequence.token_ids[first : first + self.num_output]

    @property
    def last_id(self) -> int:
        return self._sequence.token_ids[self._sequence.num_prompt + self.num_output - 1]

    def answer(self, edit: bytes | TokenEdit) -> None:
        try:
            edit = edit if isinstance(edit, TokenEdit) else TokenEdit(edit)
            if edit.mask is not None:
                self.masks = read_mask(edit.mask, self._vocab_size)[None].data
            check_bias(edit.bias, self._vocab_size)
        except Exception as error:  # noqa: BLE001 (whatever is wrong with an answer ends its request)
            self.fail(error)
            return
        self.bias = edit.bias
        self._answers.take(self)

    def answer_from(self, masks: memoryview, row: int) -> None:
        self.masks, self.row = masks, row
        self._answers.take(self)

    def fail(self, error: BaseException) -> None:
        self.error = _refusal(error)
        self._answers.take(self)


class AnswerThreads:
    """Calls TokenMasks in threads, one sequence at a time (implements MaskAnswerer)."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._threads: ThreadPoolExecutor | None = None
        """None: not used yet."""

    def begin(self, questions: Sequence[MaskQuestion]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._number, thread_name_prefix="trtc-masks")
        for question in questions:
            self._threads.submit(_ask, question)

    def close(self) -> None:
        """Drop the questions that have not been started."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _ask(question: MaskQuestion) -> None:
    source = question.source
    try:
        edit = source.allowed(question.output_ids)  # type: ignore[union-attr]
    except BaseException as error:  # noqa: BLE001 (a caller's code: whatever it raises is its answer)
        question.fail(error)
    else:
        question.answer(edit)


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
