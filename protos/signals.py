"""Signals that end a command: raised as an exception, and deferred in critical sections.

A command that gets such a signal unwinds like one that fails, so that `with` and `finally` blocks
remove unfinished files.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_HELD_BACK = (signal.SIGINT, *_ENDING)


class SignalExit(BaseException):
    """A signal asked this process to end; no `except Exception` swallows it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(self.word)

    @property
    def word(self) -> str:
        """The shell's word for the signal."""
        return {signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}[signal.Signals(self.number)]

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells report it."""
        return 128 + self.number


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise SignalExit in the main thread.

    Signals that have a handler, or are ignored (`nohup`), are not changed. Only the main thread can
    handle signals; in other threads this does nothing.
    """
    if not _is_main_thread():
        yield
        return
    ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _raise_exit)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SignalExit(number)


class Deferral:
    """Signals that wait while `is_open` is False."""

    def __init__(self) -> None:
        self.is_open = False
        """Whether signals are delivered at once. A plain attribute, because setting it is atomic
        with respect to signals."""
        self._handlers: dict[int, Any] = {}
        self._waiting: list[int] = []

    def install(self) -> None:
        if not _is_main_thread():
            return
        for number in _HELD_BACK:
            handler = signal.getsignal(number)
            if handler is not None and handler is not signal.SIG_IGN:
                self._handlers[number] = handler
                signal.signal(number, self._arrived)

    def deliver(self) -> None:
        """Deliver deferred signals."""
        while self._waiting:
            number = self._waiting.pop(0)
            self._pass_on(number, None)

    def remove(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.is_open:
            self._pass_on(number, frame)
        else:
            self._waiting.append(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        handler: Callable[[int, FrameType | None], Any] | signal.Handlers = self._handlers[number]
        if callable(handler):
            handler(number, frame)
        else:
            # The default action ends the process.
            signal.signal(number, handler)
            signal.raise_signal(number)


@contextmanager
def deferred_signals() -> Iterator[Deferral]:
    """Defer SIGINT, SIGTERM and SIGHUP until the block ends, or while it is not open:

    with deferred_signals() as signals:
        ...                         # make something: no signal leaves it half made
        try:
            signals.is_open = True
            signals.deliver()
            ...                     # work: signals take effect
        finally:
            signals.is_open = False
            ...                     # take it away: no signal interrupts that
    """
    deferral = Deferral()
    deferral.install()
    try:
        yield deferral
    finally:
        deferral.remove()
        deferral.deliver()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
