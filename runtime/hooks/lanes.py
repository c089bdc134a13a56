"""The processes of a server's hooks, and the calls on their way to them.

    call ─> lane ─> process          one call at a time; its answers come in order
               └──> spare            takes over when a call hangs or ends the process

Calls of one iteration of the asyncio loop are sent together. If a call runs for too long its
process is killed, only that call fails, and other calls without an answer go to a new process: they
had not begun, or depend on their arguments only.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trtc.protos.errors import HookError, TrtcError
from trtc.runtime.hooks.config import HooksConfig
from trtc.runtime.hooks.process import HookProcess, ProcessLost

_SECOND_LOOK_S = 0.02
"""Seconds until a call counts as hung, for an answer that a busy loop has not read yet."""
_log = logging.getLogger("trtc.hooks")


@dataclass(eq=False)
class Call(ABC):
    """A call until it is answered."""

    method: str
    request_id: str
    frame: bytes
    number: int = 0
    """Its number among the calls sent to its process, from 1; 0: not sent."""

    @property
    @abstractmethod
    def is_wanted(self) -> bool:
        """Whether the answer is still needed."""

    @abstractmethod
    def give(self, content: bytes) -> None:
        """Set the answer's content."""

    def fail(self, problem: str) -> None:
        _log.error("hook=%s request=%r %s", self.method, self.request_id, problem)
        self.refuse(failed(self.method, problem))

    @abstractmethod
    def refuse(self, error: TrtcError) -> None:
        """Fail the call with an error."""


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

    def add(self, lane: int, call: Call) -> None:
        """Send a call, together with others of the same iteration of the loop."""
        self._lanes[lane].add(call)

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
        self._calls: deque[Call] = deque()
        """Calls without an answer, oldest first."""
        self._process: HookProcess | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._unsent: list[Call] = []
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

    def add(self, call: Call) -> None:
        """Send a call, together with others of the same iteration of the loop."""
        if not self._calls:
            self._since = self._loop.time()
        self._calls.append(call)
        if self._process is not None:
            if not self._unsent:
                self._loop.call_soon(self._send)
            self._unsent.append(call)
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
        self._calls = deque(call for call in self._calls if call.is_wanted)
        self._since = self._loop.time()
        self._num_sent = 0
        self._unsent = list(self._calls)
        self._send()
        self._watch()
        self._reading = asyncio.create_task(self._read(process), name="trtc-hooks")

    def _send(self) -> None:
        if self._process is not None and self._unsent:
            for call in self._unsent:
                self._num_sent += 1
                call.number = self._num_sent
            self._process.send(b"".join(call.frame for call in self._unsent))
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
                for content in contents:
                    if not self._calls:
                        raise ProcessLost("gave an answer to no call")
                    self._calls.popleft().give(content)
        except ProcessLost as error:
            if process is self._process:
                self._replace(str(error))

    def _replace(self, problem: str) -> None:
        """Fail the running call, or else the oldest one, and send the others to a new process."""
        assert self._process is not None
        running = self._process.running.number
        self._process.kill()
        self._process = None
        if self._calls:
            first = self._calls[0].number
            at = running - first if 0 < first <= running else 0
            call = self._calls[at]
            del self._calls[at]
            call.fail(problem)
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

    def _fail_all(self, problem: str) -> None:
        while self._calls:
            self._calls.popleft().fail(problem)

    def _watch(self) -> None:
        if self._timer is None and self._calls:
            self._timer = self._loop.call_at(self._since + self._timeout_s, self._look)

    def _look(self, seen: Call | None = None) -> None:
        """Replace the process if a call has run for too long; `seen`: the oldest call at the last
        check."""
        self._timer = None
        if not self._calls or self._process is None:
            return
        oldest, running = self._calls[0], self._process.running
        if running.number >= oldest.number:
            self._since = max(self._since, running.began_at)
        if self._loop.time() < self._since + self._timeout_s:
            self._watch()
        elif oldest is seen:
            self._replace(f"took longer than {self._timeout_s:g} s")
        else:
            self._timer = self._loop.call_later(_SECOND_LOOK_S, self._look, oldest)


def failed(method: str, problem: str) -> HookError:
    """The client's error; details are only in the log, because they may reveal internals."""
    kept = problem if "\n" not in problem else "failed"
    return HookError(
        f"the server's hook {method} {kept}", remedy="Its operator finds the cause in its log"
    )
