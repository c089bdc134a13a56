"""Calls of hooks from a server, which has a thread of its own for them.

    call         (asyncio loop)   ─┐                          ┌─> awaited there
    begin_edits  (engine's thread) ├─> hooks' thread: lanes ──┤
                                   ┘                          └─> answered, in the hooks' thread

So a step that waits for answers of logits_processor does not wait for an asyncio loop that is busy
with streams. Calls of one iteration of a loop are handed over together, and so are their answers.
"""

import asyncio
import itertools
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from trtc.protos.errors import ForbiddenError, HookError, TrtcError
from trtc.runtime.hooks.child import FAILED, OK, REFUSED
from trtc.runtime.hooks.config import HooksConfig
from trtc.runtime.hooks.contract import LogitsEdit, Parameters, RequestInfo, Stop
from trtc.runtime.hooks.lanes import Answer, Calls, Lanes, failed
from trtc.runtime.host.loop_thread import LoopThread
from trtc.runtime.host.relay import Relay

_EDITS = "logits_processor"
_NO_CHANGE = msgspec.msgpack.encode((OK, None))
_ANSWER = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_RESULTS: Mapping[str, "msgspec.msgpack.Decoder[Any]"] = {
    "on_request": msgspec.msgpack.Decoder(Parameters | None),
    "on_prompt": msgspec.msgpack.Decoder(list[int] | None),
    "logits_processor": msgspec.msgpack.Decoder(LogitsEdit | None),
    "on_output": msgspec.msgpack.Decoder(str | Stop | None),
}
_log = logging.getLogger("trtc.hooks")


class Edit(NamedTuple):
    """A call of logits_processor for one token (implements Call)."""

    lane: int
    info: RequestInfo
    output_ids: Sequence[int]
    asker: Any
    """What the answer is for; not sent."""

    @property
    def request_id(self) -> str:
        return self.info.request_id

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.info, self.output_ids

    @property
    def is_wanted(self) -> bool:
        return True


Edited = tuple[Edit, LogitsEdit | TrtcError | None]
"""A call, and its answer."""
SettleEdits = Callable[[Sequence[Edited]], None]


class _Awaited(NamedTuple):
    """A call that a loop awaits (implements Call)."""

    request_id: str
    arguments: tuple[Any, ...]
    answer: "asyncio.Future[bytes]"

    @property
    def is_wanted(self) -> bool:
        return not self.answer.done()


class HookCalls:
    """The hooks of a server. `start`, `call` and `close` it in one asyncio loop."""

    def __init__(self, config: HooksConfig) -> None:
        self._config = config
        self._lanes = Lanes(config)
        self._methods: frozenset[str] = frozenset()
        self._turns = itertools.count()
        self._thread: LoopThread | None = None
        self._calls: dict[tuple[int, str], deque[_Awaited]] = {}
        """Calls of this iteration of the loop, by lane and method."""
        self._answers: Relay | None = None
        """To the loop of `call`."""
        self._closing = threading.Lock()
        """Held while edits are handed over, so that none are after the end."""
        self._closed = False

    @property
    def methods(self) -> frozenset[str]:
        """Names of the hooks that the class has."""
        return self._methods

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that answer calls."""
        return self._lanes.pids

    async def start(self) -> None:
        """
        Raises:
            RequestError: the class cannot be imported or instantiated, or has no hook.
        """
        own, self._thread = asyncio.get_running_loop(), LoopThread("trtc-hooks")
        self._answers = Relay(self._thread.loop, own)
        self._methods = await self._thread.run(self._lanes.open())

    def lane(self) -> int:
        """The lane of a new request, round-robin."""
        return next(self._turns) % self._config.num_processes

    async def call(self, lane: int, method: str, request_id: str, *arguments: Any) -> Any:
        """Call a hook; returns its result, or None if the class does not have the hook.

        Raises:
            ForbiddenError: the hook refuses the request.
            HookError: the hook fails, takes too long, or returns a wrong type.
        """
        if method not in self._methods:
            return None
        if self._closed:
            raise _ended(method)
        loop = asyncio.get_running_loop()
        if not self._calls:
            loop.call_soon(self._hand_over)
        future = loop.create_future()
        calls = self._calls.get((lane, method))
        if calls is None:
            calls = self._calls[lane, method] = deque()
        calls.append(_Awaited(request_id, arguments, future))
        answer = await future
        if answer == _NO_CHANGE:
            return None
        return _result(method, request_id, answer)

    def _hand_over(self, thread: LoopThread | None = None) -> None:
        """Pass the calls of this iteration to the hooks' thread, at once: a wake-up for each would
        let both threads take the GIL from each other."""
        thread = thread or self._thread
        if self._calls and thread is not None:
            calls, self._calls = self._calls, {}
            thread.loop.call_soon_threadsafe(self._add, calls)

    def _add(self, calls: Mapping[tuple[int, str], deque[_Awaited]]) -> None:
        """In the hooks' thread."""
        for (lane, method), waiting in calls.items():
            self._lanes.add(lane, Calls(method, waiting, self._settle))

    def _settle(self, ended: Sequence[tuple[_Awaited, Answer]]) -> None:
        """In the hooks' thread."""
        assert self._answers is not None
        self._answers.post(_settle, ended)

    def begin_edits(self, edits: Sequence[Edit], settle: SettleEdits) -> None:
        """Call logits_processor for all edits. Thread-safe.

        Args:
            settle: called with some of the edits and their answers, in the hooks' thread or by this
                method; once for each edit.
        """
        with self._closing:
            if not self._closed and self._thread is not None:
                self._thread.loop.call_soon_threadsafe(_add_edits, self._lanes, edits, settle)
                return
        settle([(edit, _ended(_EDITS)) for edit in edits])

    async def close(self) -> None:
        """End all processes and the thread; calls fail with HookError. Idempotent."""
        with self._closing:
            self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._hand_over(thread)
            await thread.run(self._lanes.close())
            await thread.stop()


def _add_edits(lanes: Lanes, edits: Sequence[Edit], settle: SettleEdits) -> None:
    by_lane: dict[int, deque[Edit]] = defaultdict(deque)
    for edit in edits:
        by_lane[edit.lane].append(edit)
    for lane, waiting in by_lane.items():
        lanes.add(lane, Calls(_EDITS, waiting, partial(_settle_edits, settle)))


def _settle_edits(settle: SettleEdits, ended: Sequence[tuple[Edit, Answer]]) -> None:
    settle(
        [(edit, None if answer == _NO_CHANGE else _edited(edit, answer)) for edit, answer in ended]
    )


def _edited(edit: Edit, answer: Answer) -> LogitsEdit | TrtcError | None:
    if isinstance(answer, TrtcError):
        return answer
    try:
        given: LogitsEdit | None = _result(_EDITS, edit.request_id, answer)
    except TrtcError as error:
        return error
    return given


def _settle(ended: Sequence[tuple[_Awaited, Answer]]) -> None:
    for call, answer in ended:
        if call.answer.done():  # its caller has gone
            continue
        if isinstance(answer, TrtcError):
            call.answer.set_exception(answer)
        else:
            call.answer.set_result(answer)


def _ended(method: str) -> HookError:
    return failed(method, "is not called any more: the server ends")


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
