"""The processes of a server's hooks, and the calls on their way to them.

    call ─> lane ─> process          one call at a time; its answers come in order
               └──> spare            takes over when a call hangs or ends the process

Calls of one iteration of the asyncio loop are sent together, those of a method as one message. If a
call runs for too long its process is killed, only that call fails, and other calls without an
answer go to a new process: they had not begun, or depend on their arguments only.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from trtc.protos.errors import HookError, TrtcError
from trtc.runtime.hooks.config import HooksConfig
from trtc.runtime.hooks.process import HookProcess, ProcessLost, framed_calls

_SECOND_LOOK_S = 0.02
"""Seconds until a call counts as hung, for an answer that a busy loop has not read yet."""
_log = logging.getLogger("trtc.hooks")


class Call(Protocol):
    """One call of a hook."""

    @property
    def request_id(self) -> str: ...

    @property
    def arguments(self) -> tuple[Any, ...]: ...

    @property
    def is_wanted(self) -> bool:
        """Whether the answer is still needed."""


CallT = TypeVar("CallT", bound=Call)
Answer = bytes | TrtcError
"""The content of an answer, or why there is none."""


class Calls(Generic[CallT]):
    """Calls of one method that are sent together.

    Args:
        waiting: the calls, in order.
        settle: called with calls that have ended, and their answers; each call ends once.
    """

    def __init__(
        self,
        method: str,
        waiting: deque[CallT],
        settle: Callable[[Sequence[tuple[CallT, Answer]]], None],
    ) -> None:
        self.method = method
        self.number = 0
        """Number of the first call without an answer among those sent to its process, from 1; 0:
        they are not sent."""
        self._waiting = waiting
        self._settle = settle
        self._ended: list[tuple[CallT, Answer]] = []
        """Calls that have ended since the last `flush`."""

    def __len__(self) -> int:
        """How many have no answer."""
        return len(self._waiting)

    def frame(self) -> bytes:
        """The message with those that have no answer."""
        return framed_calls(self.method, [one.arguments for one in self._waiting])

    def drop_unwanted(self) -> None:
        self._waiting = deque(one for one in self._waiting if one.is_wanted)

    def give(self, content: bytes) -> None:
        """Answer the first one."""
        self._ended.append((self._waiting.popleft(), content))
        self.number += 1

    def fail(self, at: int, problem: str) -> None:
        """Fail the one that `at` others come before."""
        call = self._waiting[at]
        del self._waiting[at]
        _log.error("hook=%s request=%r %s", self.method, call.request_id, problem)
        self._ended.append((call, failed(self.method, problem)))

    def flush(self) -> None:
        """Settle those that have ended."""
        if self._ended:
            ended, self._ended = self._ended, []
            self._settle(ended)


class Lanes:
    """All lanes and the spare process; used in one asyncio loop."""

    def __init__(self, config: HooksConfig) -> None:
        self._config = config
        self._lanes: list[_Lane] = []
        self._spare: asyncio.Task[HookProcess] | None = None
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that answer calls."""
        return [lane.pid for lane in self._lanes if lane.pid is not None]

    async def open(self) -> frozenset[str]:
        """Start the processes. Returns the methods that the class has.

        Raises:
            RequestError: the class cannot be imported or instantiated, or has no hook.
        """
        first = await HookProcess.start(self._config.name)
        for _ in range(self._config.num_processes):
            self._lanes.append(_Lane(self._config.timeout_s, self._take_spare))
        self._lanes[0].use(first)
        self._prepare_spare()
        await asyncio.gather(*(lane.open() for lane in self._lanes[1:]))
        return first.methods

    def add(self, lane: int, calls: Calls[Any]) -> None:
        """Send calls, together with others of the same iteration of the loop."""
        self._lanes[lane].add(calls)

    async def close(self) -> None:
        """End all processes; calls without an answer fail. Idempotent."""
        self._closed = True
        if self._spare is not None:
            self._spare.cancel()
            for one in await asyncio.gather(self._spare, return_exceptions=True):
                if isinstance(one, HookProcess):
                    one.kill()
            self._spare = None
        for lane in self._lanes:
            lane.close()

    async def _take_spare(self) -> HookProcess:
        spare, self._spare = self._spare, None
        self._prepare_spare()
        if spare is not None:
            try:
                return await spare
            except TrtcError:
                _log.warning("a process for hooks could not be started; trying again")
        return await HookProcess.start(self._config.name)

    def _prepare_spare(self) -> None:
        if not self._closed:
            starting = HookProcess.start(self._config.name)
            self._spare = asyncio.create_task(starting, name="trtc-hooks-spare")


class _Lane:
    """Sends calls to one process, and replaces it if it fails."""

    def __init__(self, timeout_s: float, take: Callable[[], Awaitable[HookProcess]]) -> None:
        self._timeout_s = timeout_s
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Calls[Any]] = deque()
        """Calls without an answer, oldest first."""
        self._process: HookProcess | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._unsent: list[Calls[Any]] = []
        """The last of `_calls` that are not sent yet, if there is a process."""
        self._num_sent = 0
        """Number of calls sent to the process."""
        self._since = 0.0
        """A time, by loop.time(), at which the oldest call had not begun."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def add(self, calls: Calls[Any]) -> None:
        """Send calls, together with others of the same iteration of the loop."""
        if not self._calls:
            self._since = self._loop.time()
        self._calls.append(calls)
        if self._process is not None:
            if not self._unsent:
                self._loop.call_soon(self._send)
            self._unsent.append(calls)
            self._watch()
        elif self._opening is None:
            self._reopen()

    async def open(self) -> None:
        """Start the process; raises RequestError if that fails."""
        self.use(await self._take())

    def use(self, process: HookProcess) -> None:
        """Send the calls to a new process."""
        if self._closed:
            process.kill()
            return
        self._process = process
        for calls in self._calls:
            calls.drop_unwanted()
        self._calls = deque(calls for calls in self._calls if calls)
        self._since = self._loop.time()
        self._num_sent = 0
        self._unsent = list(self._calls)
        self._send()
        self._watch()
        self._reading = asyncio.create_task(self._read(process), name="trtc-hooks")

    def _send(self) -> None:
        if self._process is not None and self._unsent:
            for calls in self._unsent:
                calls.number = self._num_sent + 1
                self._num_sent += len(calls)
            self._process.send(b"".join(calls.frame() for calls in self._unsent))
            self._unsent = []

    def close(self) -> None:
        self._closed = True
        for task in (self._reading, self._opening):
            if task is not None:
                task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._fail_all("did not end before the server did")

    async def _read(self, process: HookProcess) -> None:
        try:
            while True:
                contents = await process.receive()
                self._since = self._loop.time()
                self._give(contents)
        except ProcessLost as error:
            if process is self._process:
                self._replace(str(error))

    def _give(self, contents: Sequence[bytes]) -> None:
        """Answer the oldest calls.

        Raises:
            ProcessLost: there are more answers than calls.
        """
        for content in contents:
            if not self._calls:
                raise ProcessLost("gave an answer to no call")
            first = self._calls[0]
            first.give(content)
            if not first:
                self._calls.popleft().flush()
        if self._calls:
            self._calls[0].flush()

    def _replace(self, problem: str) -> None:
        """Fail the running call, or else the oldest one, and send the others to a new process."""
        assert self._process is not None
        running = self._process.running.number
        self._process.kill()
        self._process = None
        if self._calls:
            first = self._calls[0].number
            self._fail(running - first if 0 < first <= running else 0, problem)
        if self._calls:
            self._reopen()

    def _reopen(self) -> None:
        self._opening = asyncio.create_task(self._open_again(), name="trtc-hooks-open")

    async def _open_again(self) -> None:
        try:
            await self.open()
        except TrtcError as error:
            self._fail_all(f"has no process: {error}")
        finally:
            self._opening = None

    def _fail(self, at: int, problem: str) -> None:
        """Fail the call that `at` others come before."""
        for calls in self._calls:
            if at < len(calls):
                calls.fail(at, problem)
                calls.flush()
                break
            at -= len(calls)
        self._calls = deque(calls for calls in self._calls if calls)

    def _fail_all(self, problem: str) -> None:
        failing, self._calls = self._calls, deque()
        for calls in failing:
            while calls:
                calls.fail(0, problem)
            calls.flush()

    def _watch(self) -> None:
        if self._timer is None and self._calls:
            self._timer = self._loop.call_at(self._since + self._timeout_s, self._look)

    def _look(self, seen: tuple[Calls[Any], int] | None = None) -> None:
        """Replace the process if a call has run for too long; `seen`: the oldest calls and their
        number at the last check."""
        self._timer = None
        if not self._calls or self._process is None:
            return
        oldest, running = self._calls[0], self._process.running
        if running.number >= oldest.number:
            self._since = max(self._since, running.began_at)
        if self._loop.time() < self._since + self._timeout_s:
            self._watch()
        elif (oldest, oldest.number) == seen:
            self._replace(f"took longer than {self._timeout_s:g} s")
        else:
            self._timer = self._loop.call_later(_SECOND_LOOK_S, self._look, (oldest, oldest.number))


def failed(method: str, problem: str) -> HookError:
    """The client's error; details are only in the log, because they may reveal internals."""
    kept = problem if "\n" not in problem else "failed"
    return HookError(
        f"the server's hook {method} {kept}", remedy="Its operator finds the cause in its log"
    )
