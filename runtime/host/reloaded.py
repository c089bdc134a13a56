"""Values that are reloaded when their files change: certificates, API keys."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from trtc.protos.errors import TrtcError

_log = logging.getLogger("trtc.server")

T = TypeVar("T")
Mark = tuple[int, ...]

RETRY_S = 1.0
"""Seconds between two attempts to load files after a failure."""
MAX_ATTEMPTS = 5
"""Most attempts to load files that change while they are read."""


class Reloaded(Generic[T]):
    """A value loaded from files. Thread-safe.

    There is no background thread: each access checks the files' status, which takes microseconds.
    If changed files cannot be loaded, such as a certificate whose key has not been replaced yet,
    the failure is logged and the last good value is kept.

    Args:
        paths: all files that `load` reads. Links are followed.
        load: loads the value.

    Raises:
        TrtcError: the first `load` fails.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        self._next_attempt = 0.0
        self._failed_marks: tuple[Mark, ...] | None = None
        """Marks of the files whose failure was logged."""
        self._marks, self._value = self._load_whole()

    def get(self) -> T:
        """The value for the current files."""
        with self._lock:
            marks = self._look()
            if marks != self._marks and time.monotonic() >= self._next_attempt:
                self._reload(marks)
            return self._value

    def _reload(self, marks: tuple[Mark, ...]) -> None:
        try:
            self._marks, self._value = self._load_whole()
        except TrtcError as error:
            self._next_attempt = time.monotonic() + RETRY_S
            if marks != self._failed_marks:
                self._failed_marks = marks
                _log.error("changed files were not loaded, the last good ones stay: %s", error)
            return
        self._failed_marks = None
        _log.info("loaded again: %s", ", ".join(str(path) for path in self._paths))

    def _load_whole(self) -> tuple[tuple[Mark, ...], T]:
        """Load until the files did not change during the read."""
        for _ in range(MAX_ATTEMPTS):
            marks = self._look()
            value = self._load()
            if marks == self._look():
                break
        return marks, value

    def _look(self) -> tuple[Mark, ...]:
        return tuple(_mark(path) for path in self._paths)


def _mark(path: Path) -> Mark:
    """Identity of a file's contents, which changes when it is written to or replaced; (): no
    file."""
    try:
        found = os.stat(path)  # noqa: PTH116  # Path.stat takes twice as long
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
