"""trtc/commands/talk/interruption.py: Ctrl-C comes in the midst of what may not be interrupted."""

import signal

import pytest

from trtc.commands.talk.interruption import Interruption
from trtc.protos.errors import CancelledError


class Answer:
    """Ctrl-C comes within `read`, as it may within a call of gRPC that holds a lock."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.reads_completed = 0

    def cancel(self) -> None:
        self.is_cancelled = True

    def read(self) -> None:
        signal.raise_signal(signal.SIGINT)
        self.reads_completed += 1
        if self.is_cancelled:
            raise CancelledError("it was cancelled")


def test_a_read_is_completed_before_the_answer_ends() -> None:
    answer, before = Answer(), signal.getsignal(signal.SIGINT)
    with Interruption() as interruption, pytest.raises(CancelledError):
        interruption.cancels(answer)
        answer.read()
    assert (answer.reads_completed, interruption.has_come) == (1, True)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_that_begins_after_ctrl_c_is_cancelled_at_once() -> None:
    answer = Answer()
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        interruption.cancels(answer)
    assert answer.is_cancelled


def test_a_second_ctrl_c_ends_the_wait() -> None:
    answer = Answer()
    with Interruption() as interruption, pytest.raises(KeyboardInterrupt):
        interruption.cancels(answer)
        with pytest.raises(CancelledError):
            answer.read()
        answer.read()
    assert answer.reads_completed == 1
