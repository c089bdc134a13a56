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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trtc.protos.errors import ForbiddenError, HookError, TrtcError
from trtc.runtime.hooks.child import FAILED, OK, REFUSED
from trtc.runtime.hooks.config import HooksConfig
from trtc.runtime.hooks.contract import LogitsEdit, Parameters, RequestInfo, Stop
from trtc.runtime.hooks.lanes import Call, Lanes, failed
from trtc.runtime.hooks.process import framed
from trtc.runtime.host.loop_thread import LoopThread
from trtc.runtime.host.relay import Relay
from trtc.runtime.text.surrogates import without_surrogates

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


@dataclass(frozen=True)
class Edit:
    """A call of logits_processor for one token."""

    lane: int
    info: RequestInfo
    output_ids: Sequence[int]
    answered: Callable[[LogitsEdit | None], None]
    """Either this or `failed` is called once, in the hooks' thread or by `begin_edits`."""
    failed: Callable[[TrtcError], None]


@dataclass(eq=False)
class _AwaitedCall(Call):
    answer: "asyncio.Future[bytes]" = field(kw_only=True)
    answers: Relay = field(kw_only=True)
    """To the loop that awaits it."""

    @property
    def is_wanted(self) -> bool:
        return not self.answer.done()

    def give(self, content: bytes) -> None:
        self.answers.post(_settle, self.answer.set_result, self.answer, content)

    def refuse(self, error: TrtcError) -> None:
        self.answers.post(_settle, self.answer.set_exception, self.answer, error)


@dataclass(eq=False)
class _EditCall(Call):
    edit: Edit = field(kw_only=True)

    @property
    def is_wanted(self) -> bool:
        return True

    def give(self, content: bytes) -> None:
        if content == _NO_CHANGE:
            self.edit.answered(None)
            return
        try:
            given = _result(self.method, self.request_id, content)
        except TrtcError as error:
            self.refuse(error)
        else:
            self.edit.answered(given)

    def refuse(self, error: TrtcError) -> None:
        self.edit.failed(error)


class HookCalls:
    """The hooks of a server. `start`, `call` and `close` it in one asyncio loop."""

    def __init__(self, config: HooksConfig) -> None:
        self._config = config
        self._lanes = Lanes(config)
        self._methods: frozenset[str] = frozenset()
        self._turns = itertools.count()
        self._thread: LoopThread | None = None
        self._calls: Relay | None = None
        """To the hooks' thread."""
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
        self._calls = Relay(own, self._thread.loop)
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
        assert self._calls is not None
        assert self._answers is not None
        future = asyncio.get_running_loop().create_future()
        frame = framed(_call(method, arguments))
        call = _AwaitedCall(method, request_id, frame, answer=future, answers=self._answers)
        self._calls.post(self._lanes.add, lane, call)
        answer = await future
        if answer == _NO_CHANGE:
            return None
        return _result(method, request_id, answer)

    def begin_edits(self, edits: Sequence[Edit]) -> None:
        """Call logits_processor for all edits. Thread-safe."""
        with self._closing:
            if not self._closed and self._thread is not None:
                self._thread.loop.call_soon_threadsafe(_add_edits, self._lanes, edits)
                return
        for edit in edits:
            edit.failed(_ended(_EDITS))

    async def close(self) -> None:
        """End all processes and the thread; calls fail with HookError. Idempotent."""
        with self._closing:
            self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            if self._calls is not None:
                self._calls.flush()
            await thread.run(self._lanes.close())
            await thread.stop()


def _add_edits(lanes: Lanes, edits: Sequence[Edit]) -> None:
    for edit in edits:
        frame = framed(_call(_EDITS, (edit.info, edit.output_ids)))
        lanes.add(edit.lane, _EditCall(_EDITS, edit.info.request_id, frame, edit=edit))


def _settle(
    settle: Callable[[Any], None], answer: "asyncio.Future[bytes]", value: bytes | TrtcError
) -> None:
    if not answer.done():  # else its caller has gone
        settle(value)


def _ended(method: str) -> HookError:
    return failed(method, "is not called any more: the server ends")


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
