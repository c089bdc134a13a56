"""A log file of lines, written by a separate thread and rotated by size.

    write (any thread, never waits) ──► bounded queue ──► thread ──► FILE ──► FILE.1 ──► ... FILE.n

If the disk fails or hangs, lines wait in the queue. If it is full, new lines are dropped and
counted, and when lines can be written again one of them has the number of lost lines. A line is
written as a whole or not at all.
"""

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtc.protos.errors import RequestError

_log = logging.getLogger("trtc.server")

RETRY_S = 1.0
"""Seconds between two attempts to write."""
MAX_BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class LineLogConfig:
    path: Path
    max_bytes: int = 100_000_000
    """Most bytes of a file; it is rotated before a line that would exceed them."""
    num_kept: int = 10
    """Number of rotated files that are kept; the newest is `FILE.1`."""
    max_queued_bytes: int = 32 << 20
    """Most bytes of lines that wait to be written."""


class LineLog:
    """A log file, opened at once. Close it to write the remaining lines and to end its thread.

    Args:
        lost_line: makes a line with the number of lost lines.
        on_lost: called with the number of lost lines, from any thread.

    Raises:
        RequestError: the file cannot be opened, or is the log of another process.
    """

    def __init__(
        self,
        config: LineLogConfig,
        lost_line: Callable[[int], bytes],
        on_lost: Callable[[int], None],
    ) -> None:
        self._lost_line = lost_line
        self._on_lost = on_lost
        self._max_queued_bytes = config.max_queued_bytes
        try:
            self._file = _LineFile(config)
        except OSError as error:
            raise RequestError(
                f"cannot be opened for appending ({error.strerror})",
                field=str(config.path),
                remedy="Give a regular file that no other process writes, in a directory that "
                "the server may write to",
            ) from error
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_lost = 0
        """Lost lines since the last line with their number."""
        self._changed = threading.Condition()
        self._give_up_at: float | None = None
        """time.monotonic() until which writes are retried after `close`; None: not closed."""
        # A daemon thread, so that a hanging disk does not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="trtc-lines", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue a line, which must end with a line break. Never blocks."""
        with self._changed:
            if self._give_up_at is None and (self._num_bytes + len(line) <= self._max_queued_bytes):
                self._lines.append(line)
                self._num_bytes += len(line)
                self._changed.notify()
                return
            self._num_lost += 1
            is_first = self._num_lost == 1
            self._changed.notify()
        self._on_lost(1)
        if is_first:
            _log.error("lines are lost: too many wait to be written to %s", self._file.path)

    def close(self, timeout_s: float) -> int:
        """Write the remaining lines within `timeout_s`; returns the number of lines not written."""
        with self._changed:
            if self._give_up_at is None:
                self._give_up_at = time.monotonic() + timeout_s
            self._changed.notify()
        self._thread.join(timeout_s + RETRY_S)
        with self._changed:
            num_left = len(self._lines)
        if num_left:
            _log.error("%d lines were not written to %s", num_left, self._file.path)
        return num_left

    def _run(self) -> None:
        batch: list[bytes] = []
        has_failed = False
        while batch := batch or self._next_batch():
            try:
                self._file.append(batch)
            except OSError as error:
                if not has_failed:
                    _log.error("lines wait: cannot write %s (%s)", self._file.path, error.strerror)
                has_failed = True
                if self._wait_to_retry():
                    continue
                break
            if has_failed:
                _log.info("lines are written to %s again", self._file.path)
            has_failed = False
            self._take_off(batch)
            batch = []
        self._file.close()

    def _next_batch(self) -> list[bytes]:
        """Lines to write, which stay queued until they are written; []: closed."""
        with self._changed:
            while not (self._lines or self._num_lost or self._give_up_at is not None):
                self._changed.wait()
            if self._num_lost and not self._lines:
                # Last, because lost lines came after the queued ones.
                line = self._lost_line(self._num_lost)
                self._lines.append(line)
                self._num_bytes += len(line)
                self._num_lost = 0
            batch: list[bytes] = []
            size = 0
            for line in self._lines:
                batch.append(line)
                size += len(line)
                if size >= MAX_BATCH_BYTES:
                    break
            return batch

    def _take_off(self, batch: Sequence[bytes]) -> None:
        with self._changed:
            for line in batch:
                assert self._lines.popleft() is line
                self._num_bytes -= len(line)

    def _wait_to_retry(self) -> bool:
        """Wait before another attempt; False: closed, and the timeout has passed."""
        with self._changed:
            if self._give_up_at is None:
                self._changed.wait(RETRY_S)
                return True
            left_s = self._give_up_at - time.monotonic()
            if left_s > 0:
                self._changed.wait(min(left_s, RETRY_S / 10))
            return left_s > 0


class _LineFile:
    """The current file and the rotated ones. Not thread-safe. All methods may raise OSError."""

    def __init__(self, config: LineLogConfig) -> None:
        self.path = config.path
        self._max_bytes = config.max_bytes
        self._num_kept = config.num_kept
        self._descriptor, self._size = _open(self.path)

    def append(self, lines: Sequence[bytes]) -> None:
        """Append all lines, or none: after a failure the file is truncated to its old size."""
        data = b"".join(lines)
        if self._descriptor is None or self._is_moved():
            self._reopen()
        if self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        assert self._descriptor is not None
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _is_moved(self) -> bool:
        """Whether another program, such as logrotate, has renamed or removed the file."""
        assert self._descriptor is not None
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return True

    def _rotate(self) -> None:
        for number in range(self._num_kept, 0, -1):
            before = self.path if number == 1 else self._numbered(number - 1)
            with contextlib.suppress(FileNotFoundError):
                before.replace(self._numbered(number))
        self._reopen(begin_anew=self._num_kept == 0)

    def _reopen(self, *, begin_anew: bool = False) -> None:
        self.close()
        self._descriptor, self._size = _open(self.path, begin_anew=begin_anew)

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def _open(path: Path, *, begin_anew: bool = False) -> tuple[int | None, int]:
    """Open and lock the file; returns its descriptor and size. Ends an incomplete last line of a
    killed process."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if begin_anew:
            os.ftruncate(descriptor, 0)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            size += os.write(descriptor, b"\n")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, size
