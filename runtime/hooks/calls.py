"""Calls of hooks from a server: in processes, in order, and each for a bounded time.

    call ─> lane ─> process          one call at a time; its answers come in order
               └──> spare            takes over when a call hangs or ends the process

The oldest call of a lane is the one that runs. When it has run for too long its process is killed,
it alone fails, and the calls behind it go to a new process; none of them had begun.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from trtc.protos.errors import ForbiddenError, HookError, TrtcError, UnavailableError
from trtc.runtime.hooks.child import FAILED, OK, REFUSED
from trtc.runtime.hooks.config import HooksConfig
from trtc.runtime.hooks.contract import LogitsEdit, Parameters, Stop
from trtc.runtime.hooks.process import HookProcess, ProcessLost, framed
from trtc.runtime.text.surrogates import without_surrogates

_SECOND_LOOK_S = 0.02
"""For an answer that has come, but that a busy loop has not read yet."""
_CLOSED_CHECK_S = 1.0
"""How often a thread that waits for a call looks whether there will be an answer."""
_NO_CHANGE = msgspec.msgpack.encode((OK, None))
_ANSWER = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_RESULTS: Mapping[str, "msgspec.msgpack.Decoder[Any]"] = {
    "on_request": msgspec.msgpack.Decoder(Parameters | None),
    "on_prompt": msgspec.msgpack.Decoder(list[int] | None),
    "logits_processor": msgspec.msgpack.Decoder(LogitsEdit | None),
    "on_output": msgspec.msgpack.Decoder(str | Stop | None),
}
_log = logging.getLogger("trtc.hooks")


@dataclass(frozen=True, eq=False)
class _Call:
    method: str
    request_id: str
    frame: bytes
    answer: "asyncio.Future[bytes]"

    def fail(self, problem: str) -> None:
        _log.error("hook=%s request=%r %s", self.method, self.request_id, problem)
        if not self.answer.done():
            self.answer.set_exception(failed(self.method, problem))


class HookCalls:
    """The processes of a server's hooks. `start` it in the loop that uses it, and `close` it."""

    def __init__(self, config: HooksConfig) -> None:
        self._config = config
        self._lanes: list[_Lane] = []
        self._spare: asyncio.Task[HookProcess] | None = None
        self._methods: frozenset[str] = frozenset()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = itertools.count()
        self._closed = False

    @property
    def methods(self) -> frozenset[str]:
        """That the class has."""
        return self._methods

    @property
    def pids(self) -> list[int]:
        """Of the processes that answer calls."""
        return [lane.pid for lane in self._lanes if lane.pid is not None]

    async def start(self) -> None:
        """
        Raises:
            RequestError: the class cannot be imported or made, or has no hook.
        """
        self._loop = asyncio.get_running_loop()
        first = await HookProcess.start(self._config.name)
        self._methods = first.methods
        for _ in range(self._config.num_processes):
            self._lanes.append(_Lane(self._config.timeout_s, self._take_spare))
        self._lanes[0].use(first)
        self._prepare_spare()
        await asyncio.gather(*(lane.open() for lane in self._lanes[1:]))

    def lane(self) -> int:
        """For a new request: each in turn."""
        return next(self._turns) % len(self._lanes)

    async def call(self, lane: int, method: str, request_id: str, *arguments: Any) -> Any:
        """What a hook gives; None also if the class does not have it.

        Raises:
            ForbiddenError: it refuses the request.
            HookError: it fails, takes too long, or gives what the contract does not have.
        """
        if method not in self._methods:
            return None
        if self._closed:
            raise failed(method, "is not called any more: the server ends")
        answer = await self._lanes[lane].call(method, request_id, framed(_call(method, arguments)))
        if answer == _NO_CHANGE:
            return None
        return _result(method, request_id, answer)

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Await `call` in another thread than the loop's."""
        assert self._loop is not None
        try:
            answer = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # the loop has been closed
            coroutine.close()
            raise UnavailableError("the server has ended") from error
        while True:
            try:
                return answer.result(_CLOSED_CHECK_S)
            except TimeoutError as error:
                if self._closed:  # and nobody may be there to run it
                    answer.cancel()
                    raise UnavailableError("the server has ended") from error

    async def close(self) -> None:
        """End all processes; calls fail with HookError. Idempotent."""
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
    """Calls of one process at a time."""

    def __init__(self, timeout_s: float, take: Callable[[], Awaitable[HookProcess]]) -> None:
        self._timeout_s = timeout_s
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._calls: deque[_Call] = deque()
        """Without an answer yet, oldest first."""
        self._process: HookProcess | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._since = 0.0
        """loop.time() at which the oldest call began."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def call(self, method: str, request_id: str, frame: bytes) -> "asyncio.Future[bytes]":
        """The answer's content, or HookError."""
        call = _Call(method, request_id, frame, self._loop.create_future())
        if not self._calls:
            self._since = self._loop.time()
        self._calls.append(call)
        if self._process is not None:
            self._process.send(frame)
            self._watch()
        elif self._opening is None:
            self._reopen()
        return call.answer

    async def open(self) -> None:
        """Raises RequestError: no process could be started."""
        self.use(await self._take())

    def use(self, process: HookProcess) -> None:
        """Send the calls to a new process."""
        if self._closed:
            process.kill()
            return
        self._process = process
        self._calls = deque(call for call in self._calls if not call.answer.done())
        self._since = self._loop.time()
        for call in self._calls:
            process.send(call.frame)
        self._watch()
        self._reading = asyncio.create_task(self._read(process), name="trtc-hooks")

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
                content = await process.receive()
                if not self._calls:
                    raise ProcessLost("gave an answer to no call")
                call = self._calls.popleft()
                self._since = self._loop.time()
                if not call.answer.done():  # else nobody waits for it any more
                    call.answer.set_result(content)
        except ProcessLost as error:
            if process is self._process:
                self._replace(str(error))

    def _replace(self, problem: str) -> None:
        """The oldest call fails; a new process gets the others."""
        assert self._process is not None
        self._process.kill()
        self._process = None
        if self._calls:
            self._calls.popleft().fail(problem)
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

    def _look(self, seen: _Call | None = None) -> None:
        """Whether the oldest call has run for too long; `seen`: it had, a moment ago."""
        self._timer = None
        if not self._calls or self._process is None:
            return
        oldest = self._calls[0]
        if self._loop.time() < self._since + self._timeout_s:
            self._watch()
        elif oldest is seen:
            self._replace(f"took longer than {self._timeout_s:g} s")
        else:
            self._timer = self._loop.call_later(_SECOND_LOOK_S, self._look, oldest)


def failed(method: str, problem: str) -> HookError:
    """For the client: what is wrong is in the log, as it may reveal internals of the server."""
    kept = problem if "\n" not in problem else "failed"
    return HookError(
        f"the server's hook {method} {kept}", remedy="Its operator finds the cause in its log"
    )


def _call(method: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        return msgspec.msgpack.encode((method, arguments))
    except UnicodeEncodeError:
        plain = msgspec.to_builtins((method, arguments), str_keys=False)
        return msgspec.msgpack.encode(without_surrogates(plain))


def _result(method: str, request_id: str, answer: bytes) -> Any:
    status, content = _ANSWER.decode(answer)
    if status == OK:
        try:
            return _RESULTS[method].decode(content)
        except msgspec.ValidationError as error:
            _log.error("hook=%s request=%r gave a wrong result: %s", method, request_id, error)
            raise failed(method, "gave a wrong result") from error
    text = msgspec.msgpack.decode(content, type=str)
    if status == REFUSED:
        raise ForbiddenError(text or "the request is refused")
    assert status == FAILED
    _log.error("hook=%s request=%r raised\n%s", method, request_id, text.rstrip())
    raise failed(method, "failed")
