"""Rank 0's control of the other ranks: starts them, sends them orders and detects failures.

A watchdog thread fails the whole group, for good, if a rank has exited, has reported an error, is
late with a step or has drawn other tokens than rank 0. Then the other ranks are killed, and threads
that wait for the device get the error.
"""

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from trtc.protos.errors import EnvironmentFault, TrtcError
from trtc.runtime.executors.ranks.link import frame
from trtc.runtime.executors.ranks.messages import (
    Answer,
    Close,
    Failed,
    Open,
    Opened,
    Order,
    Progress,
    Ready,
)
from trtc.runtime.executors.ranks.process import RankProcess
from trtc.runtime.executors.ranks.progress import StepBook

_TICK_S = 0.25
_CAUSE_S = 1.0
"""Seconds to wait for the exit of another rank, which may be the cause of an error on rank 0."""
_CLOSE_S = 10.0

_Local = TypeVar("_Local")
_log = logging.getLogger(__name__)


def end_process(error: TrtcError) -> None:
    """End this process: rank 0's thread hangs in its device, so its requests would never end."""
    _log.critical("the device does not stop after a failure, so this process ends: %s", error)
    os._exit(error.exit_code)


@dataclass(frozen=True)
class Patience:
    """Timeouts in seconds after which a rank counts as failed, and the last resort."""

    start: float = 120.0
    open: float = 900.0
    step: float = 30.0
    """For a step: its inputs, its launches (with capture, the first time) and the device's work."""
    grace: float = 10.0
    """After a failure, for rank 0's thread to return from its device."""
    last_resort: Callable[[TrtcError], None] = field(default=end_process)
    """Called if it does not return."""


class RankGroup:
    """Ranks 1, 2, ... of an engine. One thread uses it, and another one watches the ranks."""

    def __init__(self, commands: Sequence[Sequence[str]], patience: Patience | None = None) -> None:
        """Start the processes.

        Args:
            commands: command of each rank from 1 on; the number of its socket is appended.

        Raises:
            EnvironmentFault: a process cannot be started.
        """
        self._patience = patience or Patience()
        self._changed = threading.Condition()
        self._failure: TrtcError | None = None
        self._failed_at = 0.0
        self._closing = False
        self._busy_since: float | None = None
        """Since when rank 0's thread has been in a call of its device; None: it is not."""
        self._steps = StepBook(len(commands))
        self._free_bytes: dict[int, int] = {}
        self._opened: set[int] = set()
        self._abandon: Callable[[], None] = lambda: None
        self._ranks: list[RankProcess] = []
        try:
            for number, command in enumerate(commands, 1):
                self._ranks.append(RankProcess(number, command, self._patience.step))
        except OSError as error:
            for rank in self._ranks:
                rank.end(0.0)
            raise EnvironmentFault(f"rank {number} cannot be started ({error.strerror})") from error
        self._watcher = threading.Thread(target=self._watch, name="trtc-ranks", daemon=True)
        self._watcher.start()

    @property
    def failure(self) -> TrtcError | None:
        return self._failure

    @property
    def num_ranks(self) -> int:
        """Number of ranks, including rank 0."""
        return len(self._ranks) + 1

    def on_failure(self, abandon: Callable[[], None]) -> None:
        """Call `abandon` once if the group fails, from any thread: it releases threads that wait
        for rank 0's device."""
        self._abandon = abandon
        if self._failure is not None:
            abandon()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1, 2, ..."""
        return tuple(rank.pid for rank in self._ranks)

    # The thread that drives the engine.

    def free_bytes(self) -> tuple[int, ...]:
        """Device memory of each rank from 1 on, once all are ready.

        Raises:
            TrtcError: a rank cannot start.
        """
        self._wait_for(
            lambda: len(self._free_bytes) == len(self._ranks),
            self._patience.start,
            "the other ranks have not started",
        )
        return tuple(self._free_bytes[rank.number] for rank in self._ranks)

    def open(self, orders: Sequence[Open], local: Callable[[], _Local]) -> _Local:
        """Load all ranks, which connect to each other.

        Args:
            orders: one order for each rank from 1 on.
            local: loads rank 0; runs in a separate thread, because it cannot be interrupted while
                it waits for another rank.

        Raises:
            TrtcError: a rank failed.
        """
        for rank, order in zip(self._ranks, orders, strict=True):
            self._send(rank, frame(order))
        loaded = _in_thread(local)
        loaded.add_done_callback(lambda _: self._notify())
        self._wait_for(
            lambda: (
                loaded.done()
                and (loaded.exception() is not None or len(self._opened) == len(self._ranks))
            ),
            self._patience.open,
            "the ranks have not met",
        )
        error = loaded.exception()
        if isinstance(error, Exception):
            self._give_up(error)
        return loaded.result()

    def send(self, order: Order) -> None:
        """Raises: TrtcError: the group has failed."""
        self.check()
        content = frame(order)
        for rank in self._ranks:
            self._send(rank, content)

    def begin(self, number: int) -> None:
        """Expect all other ranks to complete a step."""
        with self._changed:
            self._steps.begin(number, time.monotonic())

    def end(self, number: int, digest: int) -> None:
        """Rank 0 has completed a step; `digest` is that of all tokens drawn so far.

        Raises:
            TrtcError: another rank has drawn other tokens, or the group has failed.
        """
        with self._changed:
            problem = self._steps.end(number, digest)
        self._fail_if_strange(problem)
        self.check()

    def check(self) -> None:
        """Raises: TrtcError: the group has failed."""
        if self._failure is not None:
            raise _again(self._failure)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Context manager around calls that may hang in rank 0's device if another rank exits.

        Raises:
            TrtcError: the group has failed; it replaces an error of the device.
        """
        self.check()
        self._busy_since = time.monotonic()
        try:
            yield
        except Exception as error:
            self._give_up(error)
            raise
        finally:
            self._busy_since = None
        self.check()

    def close(self) -> None:
        """End the ranks; idempotent."""
        with self._changed:
            self._closing = True
        for rank in self._ranks:
            with suppress(OSError):
                rank.link.send(Close())
        deadline = time.monotonic() + (_CLOSE_S if self._failure is None else 0.0)
        self._watcher.join()
        for rank in self._ranks:
            rank.end(max(0.0, deadline - time.monotonic()))

    def _send(self, rank: RankProcess, content: bytes) -> None:
        try:
            rank.link.send_frame(content)
        except TimeoutError:
            self._fail(EnvironmentFault(f"{self._name(rank)} takes no orders"))
        except OSError:
            self._fail(self._death(rank))
        self.check()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait_for(self, done: Callable[[], bool], seconds: float, problem: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or done(), seconds)
            is_done = done()
        self.check()
        if not is_done:
            self._fail(EnvironmentFault(f"{problem} within {seconds:.0f} s"))
            self.check()

    def _give_up(self, error: Exception) -> None:
        """Fail after an error on rank 0. If another rank has failed, its error is raised, because
        it is probably the cause."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, _CAUSE_S)
        if self._failure is not None:
            raise _again(self._failure) from error
        self._fail(error if isinstance(error, TrtcError) else EnvironmentFault(f"rank 0: {error}"))

    # The thread that watches.

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.link.socket, selectors.EVENT_READ, rank)
            while not self._closing:
                for key, _ in selector.select(_TICK_S):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                self._look_at_the_clock()

    def _hear(self, rank: RankProcess) -> bool:
        """Process one answer; False: the rank has closed its socket."""
        try:
            answer = rank.link.receive()
        except (OSError, msgspec.DecodeError):
            answer = None
        if answer is None:
            self._fail(self._death(rank))
            return False
        if isinstance(answer, Failed):
            self._fail(answer.error(self._name(rank)))
            return False
        with self._changed:
            problem = self._take_in(rank.number, answer)
            self._changed.notify_all()
        self._fail_if_strange(problem)
        return True

    def _take_in(self, rank: int, answer: Answer) -> str:
        """Process an answer; returns the problem, or ""."""
        match answer:
            case Ready():
                self._free_bytes[rank] = answer.free_bytes
            case Opened():
                self._opened.add(rank)
            case Progress():
                return self._steps.report(rank, answer)
        return ""

    def _look_at_the_clock(self) -> None:
        now, patience = time.monotonic(), self._patience
        busy_since = self._busy_since
        if self._failure is None:
            with self._changed:
                problem = self._steps.overdue(now - patience.step)
            if not problem and busy_since is not None and now - busy_since > patience.step:
                problem = "rank 0's device has not answered"
            if problem:
                problem = f"{problem} within {patience.step:.0f} s"
                self._fail(EnvironmentFault(problem))
        elif busy_since is not None and now - self._failed_at > patience.grace:
            self._failed_at = now
            patience.last_resort(self._failure)

    # Either.

    def _fail_if_strange(self, problem: str) -> None:
        if problem:
            remedy = "Check the GPUs for memory errors"
            self._fail(EnvironmentFault(problem, remedy=remedy))

    def _fail(self, error: TrtcError) -> None:
        with self._changed:
            if self._failure is not None or self._closing:
                return
            self._failure, self._failed_at = error, time.monotonic()
            self._changed.notify_all()
        for rank in self._ranks:
            rank.kill()
        self._abandon()

    def _death(self, rank: RankProcess) -> EnvironmentFault:
        return EnvironmentFault(f"{self._name(rank)} {rank.how_it_ended()}")

    def _name(self, rank: RankProcess) -> str:
        return f"rank {rank.number} of {self.num_ranks}"


def _in_thread(work: Callable[[], _Local]) -> Future[_Local]:
    """Run `work` in a daemon thread."""
    future: Future[_Local] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 (raised again by the thread that waits)
            future.set_exception(error)

    threading.Thread(target=run, name="trtc-rank-0", daemon=True).start()
    return future


def _again(error: TrtcError) -> TrtcError:
    """A copy of an error, to raise it again."""
    return type(error)(error.problem, field=error.field, remedy=error.remedy)
