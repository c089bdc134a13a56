"""Ctrl-C while an answer comes."""

import signal
from types import FrameType, TracebackType
from typing import Protocol, Self


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Interruption:
    """Within it Ctrl-C cancels the answer instead of raising KeyboardInterrupt.

    An exception could come while gRPC holds a lock of a call; then the lock would never be given
    back, the channel's thread would wait for it, and no later call of the channel would end. A
    second Ctrl-C raises KeyboardInterrupt all the same. For the main thread.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._answer: Cancellable | None = None

    def cancels(self, answer: Cancellable) -> None:
        """Name what Ctrl-C cancels; at once if it has come already."""
        self._answer = answer
        if self.has_come:
            answer.cancel()

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._come)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _come(self, number: int, frame: FrameType | None) -> None:
        if self.has_come:
            raise KeyboardInterrupt
        self.has_come = True
        if self._answer is not None:
            self._answer.cancel()
