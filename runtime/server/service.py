"""The service behind every protocol: names, limits, tokenising, streams, readiness, draining.

    draft -> engine by name -> prompt ids -> finished request -> loop.submit -> OutputStream

It lives in one asyncio loop; engine loops run in threads of their own and only ever touch the
courier. Nothing here knows gRPC or HTTP.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from trtc.protos.errors import (
    InvalidRequestError,
    QueueFullError,
    TrtcError,
    UnavailableError,
    UnknownModelError,
    UnknownRequestError,
)
from trtc.runtime.draft import ChatMessage, RequestDraft
from trtc.runtime.model_info import ModelInfo
from trtc.runtime.server.handle import EngineHandle
from trtc.runtime.server.limits import ServiceLimits
from trtc.runtime.server.metrics import RequestClock, ServerMetrics
from trtc.runtime.server.prompts import Prompts
from trtc.runtime.server.streams import Courier, OutputStream
from trtc.runtime.validation import finish_draft


class Service:
    """Serves drafts from the engines called `names`; used in the running asyncio loop only.

    An engine can be asked about once it was added, and serves once it was set ready.
    """

    def __init__(self, names: Sequence[str], limits: ServiceLimits, metrics: ServerMetrics) -> None:
        self._handles: dict[str, EngineHandle] = {}
        self._limits = limits
        self._metrics = metrics
        self._courier = Courier(asyncio.get_running_loop())
        self._not_ready = dict.fromkeys(names, "opening")
        self._running: dict[tuple[str, str], OutputStream] = {}
        """(engine, request id) -> its stream, until the engine lets go of it."""
        self._places: set[object] = set()
        """One for each open stream that a client keeps up with."""
        self._draining = False
        self._changed = asyncio.Event()
        self._prompts = Prompts(limits)

    @property
    def engines(self) -> Mapping[str, EngineHandle]:
        """Those that are open."""
        return self._handles

    def add(self, handle: EngineHandle) -> None:
        self._handles[handle.name] = handle

    def why_not_ready(self) -> dict[str, str]:
        """Engine name -> reason, for those that do not serve now; safe from any thread."""
        return {name: reason for name, reason in self._not_ready.copy().items() if reason}

    def set_ready(self, name: str, why_not: str = "") -> None:
        """Let `name` serve, or keep it from serving and say why. Draining is not undone."""
        if not self._draining:
            self._not_ready[name] = why_not
            self._metrics.ready.labels(name).set(not why_not)

    def engine(self, name: str) -> EngineHandle:
        """The engine called `name`; the only one when `name` is empty.

        Raises:
            UnknownModelError: there is none, or several to choose from.
            UnavailableError: it is not open yet.
        """
        if not name and len(self._not_ready) == 1:
            name = next(iter(self._not_ready))
        if name not in self._not_ready:
            raise UnknownModelError(
                f"no engine is called {name[:100]!r}" if name else "several engines are served",
                field="model",
                remedy=f"Choose one of: {', '.join(sorted(self._not_ready))}",
            )
        handle = self._handles.get(name)
        if handle is None:
            raise _not_ready(name, self._not_ready[name])
        return handle

    @asynccontextmanager
    async def generate(
        self, draft: RequestDraft, *, deadline: float | None = None
    ) -> AsyncIterator[OutputStream]:
        """Run a draft; leaving the context early ends the request within a step.

        Args:
            deadline: time.monotonic() after which the request ends with DeadlineError.

        Raises:
            TrtcError: whatever keeps the request from being admitted. What befalls it later is
                raised by the stream.
        """
        handle = self.engine(draft.model)
        clock = self._metrics.clock(handle.name, time.monotonic())
        place = object()
        self._places.add(place)
        try:
            try:
                self._check_open(handle)
                stream = await self._admit(handle, draft, deadline, clock, place)
            except TrtcError as error:
                clock.fail(error.grpc_status)
                raise
            try:
                yield stream
            finally:
                self._leave(handle, stream, clock)
        finally:
            self._free(place)

    def abort(self, model: str, request_id: str) -> None:
        """End a running request; its stream then finishes with ABORTED.

        Raises:
            UnknownRequestError: none of that id is running.
        """
        handle = self.engine(model)
        if not handle.loop.abort(request_id):
            raise UnknownRequestError(
                f"no request called {request_id[:100]!r} is running",
                field="request_id",
                remedy="It may have ended; ids are those of the requests",
            )

    async def tokenize_text(self, model: str, text: str, add_special_tokens: bool) -> Sequence[int]:
        handle = self.engine(model)
        with self._one_more_call():
            return await self._prompts.text_ids(
                handle, text, add_special_tokens=add_special_tokens, field="text"
            )

    async def tokenize_chat(self, model: str, chat: Sequence[ChatMessage]) -> Sequence[int]:
        handle = self.engine(model)
        with self._one_more_call():
            return await self._prompts.chat_ids(handle, chat)

    async def detokenize(
        self, model: str, token_ids: Sequence[int], keep_special_tokens: bool
    ) -> str:
        handle = self.engine(model)
        tokenizer = handle.tokenizer_for("token_ids")
        vocab_size = handle.manifest.model.vocab_size
        for position, token in enumerate(token_ids):
            if token >= vocab_size:
                raise InvalidRequestError(
                    f"{token} is not a token",
                    field=f"token_ids[{position}]",
                    remedy=f"Token ids are from 0 to {vocab_size - 1}",
                )
        return tokenizer.decode(list(token_ids), skip_special=not keep_special_tokens)

    def info(self, model: str) -> list[ModelInfo]:
        """The engine called `model`, or every engine when `model` is empty."""
        handles = [self.engine(model)] if model else list(self._handles.values())
        return [handle.info() for handle in handles]

    def drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._draining = True
        self._not_ready = dict.fromkeys(self._not_ready, "draining")
        for name in self._not_ready:
            self._metrics.ready.labels(name).set(0)

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no stream is open and no engine holds a request; False after `timeout`."""
        deadline = time.monotonic() + timeout
        while self._places or self._running:
            self._changed.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                return False
        return True

    @property
    def num_open(self) -> int:
        """Streams open now, without those whose clients have stopped reading."""
        return len(self._places)

    def close(self) -> None:
        """Stop the tokenising threads; call it after the engine loops have stopped."""
        self._prompts.close()

    def _check_open(self, handle: EngineHandle) -> None:
        if self._draining:
            raise UnavailableError(
                "the server is shutting down", remedy="Send the request to another server"
            )
        if reason := self._not_ready[handle.name]:
            raise _not_ready(handle.name, reason)
        self._check_places()

    def _check_places(self) -> None:
        if len(self._places) > self._limits.max_streams:
            raise QueueFullError(
                f"the server has its limit of {self._limits.max_streams} open streams",
                remedy="Try again later, or raise --max-streams",
            )

    @contextmanager
    def _one_more_call(self) -> Iterator[None]:
        """Long texts wait for a thread: as many may as there may be streams."""
        place = object()
        self._places.add(place)
        try:
            self._check_places()
            yield
        finally:
            self._free(place)

    async def _admit(
        self,
        handle: EngineHandle,
        draft: RequestDraft,
        deadline: float | None,
        clock: RequestClock,
        place: object,
    ) -> OutputStream:
        request_id = draft.request_id or uuid.uuid4().hex
        prompt_ids = await self._prompts.ids(handle, draft)
        request = finish_draft(
            draft,
            request_id=request_id,
            prompt_ids=prompt_ids,
            deadline=deadline,
            bounds=handle.loop.bounds,
        )
        # From here to `submit` nothing awaits, so no other request can take the id meanwhile.
        if (handle.name, request_id) in self._running:
            raise InvalidRequestError(
                f"a request called {request_id!r} is running",
                field="request_id",
                remedy="Choose another one, or leave it empty",
            )
        stream = OutputStream(
            request_id,
            max_unread_tokens=self._limits.max_unread_tokens,
            on_failure=lambda stream: self._give_up(handle, stream, place),
            on_end=lambda stream: self._forget(handle, stream),
            on_output=lambda stream, outputs, at: clock.deliver(outputs, at),
        )
        handle.loop.submit(request, lambda delivery: self._courier.post(stream, delivery))
        self._running[handle.name, request_id] = stream
        return stream

    def _give_up(self, handle: EngineHandle, stream: OutputStream, place: object) -> None:
        """The reader lags: whoever still writes to it may do so for ever, at its own cost only."""
        if not stream.ended:
            handle.loop.abort(stream.request_id)
        self._free(place)

    def _free(self, place: object) -> None:
        self._places.discard(place)
        self._changed.set()

    def _leave(self, handle: EngineHandle, stream: OutputStream, clock: RequestClock) -> None:
        if not stream.ended:
            handle.loop.abort(stream.request_id)
        if stream.error is not None:
            clock.fail(stream.error.grpc_status)
        elif not stream.ended:
            clock.fail("CANCELLED")
        stream.close()

    def _forget(self, handle: EngineHandle, stream: OutputStream) -> None:
        self._running.pop((handle.name, stream.request_id), None)
        self._changed.set()


def _not_ready(name: str, reason: str) -> UnavailableError:
    return UnavailableError(
        f"engine {name} is not ready: {reason}",
        field="model",
        remedy="Wait until health checks say SERVING",
    )
