"""A pool of limited processes of one module.

    call ─> an idle process, or a new one that is set up ─> answer ─> idle again, or ended

All are set up once, with the same request. A process that exceeds a limit, or announces its exit,
is ended; the next call starts another one.
"""

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from trtc.protos.errors import UnavailableError
from trtc.runtime.host.limited_process import START_S, LimitedProcess, ProcessEnded


class PoolBusy(Exception):
    """All processes were busy for too long."""


class SetUpEnded(Exception):
    """A process has exited, or exceeded a limit, during its set-up: see `__cause__`."""


class SetUpRefused(Exception):
    """A process answered its set-up with another status than "ok". All later calls raise the same,
    without starting a process."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(str(answer.get("problem", "")))
        self.answer = answer


class LimitedPool:
    """Thread-safe; starts processes on demand. Close it to end its processes, which also end with
    this one."""

    def __init__(
        self, module: str, packages: Sequence[str], set_up: Mapping[str, Any], most: int
    ) -> None:
        """
        Args:
            module, packages: see LimitedProcess.
            set_up: the first request to each process.
            most: most concurrent processes.
        """
        self._module = module
        self._packages = packages
        self._set_up = set_up
        self._most = most
        self._changed = threading.Condition()
        self._idle: list[LimitedProcess] = []
        self._num_busy = 0
        self._processes: set[LimitedProcess] = set()
        self._refusal: Mapping[str, Any] | None = None
        self._closed = False
        weakref.finalize(self, _close_all, self._processes)

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        with self._changed:
            return [one.pid for one in self._processes]

    def call(
        self, request: Mapping[str, Any], seconds: float, wait_seconds: float | None = None
    ) -> dict[str, Any]:
        """Call a process; returns its answer.

        Args:
            seconds: wall-clock limit of the call.
            wait_seconds: seconds to wait for a free process; None: no limit.

        Raises:
            OutOfTime, OutOfMemory, ProcessEnded: see `LimitedProcess.call`.
            PoolBusy, SetUpEnded, SetUpRefused: see these classes.
            UnavailableError: the pool is closed, or was closed during the call.
            EnvironmentFault: no process can be started.
        """
        process = self._acquire(wait_seconds)
        is_usable = False
        try:
            answer = process.call(request, seconds)
            is_usable = not answer["last"]
        except ProcessEnded as error:
            if self._closed:
                raise _closed() from error
            raise
        finally:
            self._release(process, is_usable=is_usable)
        return answer

    def start(self, wait_seconds: float | None = None) -> None:
        """Set up a process, unless one is idle. Raises the errors of `call`."""
        self._release(self._acquire(wait_seconds), is_usable=True)

    def close(self) -> None:
        """End all processes at once. Idempotent."""
        with self._changed:
            self._closed = True
            while self._idle:
                self._discard(self._idle.pop())
            for process in self._processes:
                process.kill()  # the thread that waits for it closes it
            self._changed.notify_all()

    def _acquire(self, wait_seconds: float | None) -> LimitedProcess:
        """A process that has been set up, exclusive to this thread."""
        deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
        with self._changed:
            while True:
                if self._closed:
                    raise _closed()
                if self._refusal is not None:
                    raise SetUpRefused(self._refusal)
                if self._num_busy < self._most:
                    break
                left = None if deadline is None else deadline - time.monotonic()
                if not self._changed.wait(left):
                    raise PoolBusy
            self._num_busy += 1
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                self._discard(process)
        try:
            return self._started()
        except BaseException:
            with self._changed:
                self._num_busy -= 1
                self._changed.notify()
            raise

    def _release(self, process: LimitedProcess, *, is_usable: bool) -> None:
        with self._changed:
            self._num_busy -= 1
            if is_usable and not self._closed:
                self._idle.append(process)
            else:
                self._discard(process)
            self._changed.notify()

    def _discard(self, process: LimitedProcess) -> None:
        process.close()
        self._processes.discard(process)

    def _started(self) -> LimitedProcess:
        process = LimitedProcess(self._module, self._packages)
        with self._changed:
            self._processes.add(process)
        try:
            answer = process.call(self._set_up, START_S)
        except ProcessEnded as error:
            with self._changed:
                self._discard(process)
                if self._closed:
                    raise _closed() from error
            raise SetUpEnded from error
        if answer["status"] != "ok":
            with self._changed:
                self._discard(process)
                self._refusal = answer
                self._changed.notify_all()
            raise SetUpRefused(answer)
        return process


def _closed() -> UnavailableError:
    return UnavailableError("the engine is closed")


def _close_all(processes: set[LimitedProcess]) -> None:
    """Finalizer: end the processes of a pool that was not closed."""
    for process in processes:
        process.close()
