"""The service behind every protocol: names, limits, tokenising, streams, readiness, draining.

    request input -> engine by name (models) -> prompt ids -> request -> loop.submit -> OutputStream

It runs in one asyncio loop; engine loops run in their own threads and only access the courier. The
service is independent of gRPC and HTTP.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from trtc.protos.errors import InvalidRequestError, TrtcError, UnknownRequestError
from trtc.runtime.engine.admission import Origin, admission, chat_ids, text_ids
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.model_info import ModelInfo
from trtc.runtime.requests.principal import Principal
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.splitting import splitting
from trtc.runtime.requests.token_masks import both_masks
from trtc.runtime.scheduling.shares import Place, Resource, Shares
from trtc.runtime.service.access import Access
from trtc.runtime.service.activity import Activity
from trtc.runtime.service.audit import Audit
from trtc.runtime.service.intake import Intake
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.service.metrics import SLEEP_STATES, RequestClock, ServerMetrics
from trtc.runtime.service.model_control import ModelControl
from trtc.runtime.service.models import Models
from trtc.runtime.service.progress import Progress, Watcher
from trtc.runtime.service.prompts import Prompts
from trtc.runtime.service.quotas import Quotas
from trtc.runtime.service.streams import Courier, OutputStream
from trtc.runtime.service.timeline import Timeline
from trtc.runtime.text.chat import Chat

if TYPE_CHECKING:
    from trtc.runtime.hooks.calls import HookCalls
    from trtc.runtime.service.hooks import HookedRequest
    from trtc.runtime.service.telemetry import Telemetry


class Service:
    """Serves request inputs from the engines of `models`; used in the running asyncio loop only."""

    def __init__(
        self,
        models: Models,
        limits: ServiceLimits,
        metrics: ServerMetrics,
        access: Access | None = None,
        audit: Audit | None = None,
        hooks: "HookCalls | None" = None,
        control: ModelControl | None = None,
        telemetry: "Telemetry | None" = None,
    ) -> None:
        """
        Args:
            access: authenticates callers; None: all callers are accepted.
            audit: records requests; None: no audit log.
            hooks: the operator's hooks; None: there are none.
            control: loads and unloads models; None: the models are fixed.
            telemetry: traces requests; None: no telemetry.
        """
        self._hooks = hooks
        self.control = control
        self._telemetry = telemetry
        self._audit = Audit(None, metrics) if audit is None else audit
        self.models = models
        self.access = Access() if access is None else access
        self.limits = limits
        self.metrics = metrics
        self.activity = Activity()
        self._courier = Courier(asyncio.get_running_loop())
        self._running: set[OutputStream] = set()
        """Streams whose requests have not been released by their engines."""
        self._places = Shares(
            Resource("streams", limits.max_streams, "open streams", "--max-streams")
        )
        """One place for each open stream, except those whose client has stopped reading."""
        self._changed = asyncio.Event()
        self._prompts = Prompts()
        self._quotas = Quotas(time.monotonic)
        self.intake = Intake(limits)
        """The intake of all ports."""
        self._shown: set[str] = set()
        """Models whose readiness is exported."""
        self.models.on_change(self._show_readiness)

    @property
    def names(self) -> Sequence[str]:
        """Names of all engines, including those that are not open."""
        return self.models.names

    @property
    def engines(self) -> Mapping[str, EngineHandle]:
        """Open engines by name."""
        return self.models.engines

    def why_not_ready(self) -> dict[str, str]:
        """Engine name -> reason, for wanted engines that are not ready. Thread-safe."""
        return self.models.why_not_ready()

    def engine(self, name: str) -> EngineHandle:
        """The engine called `name`; if `name` is empty, the only one.

        Raises:
            UnknownModelError: there is none, or several to choose from.
            UnavailableError: it is not open.
        """
        return self.models.engine(name)

    def engine_for(self, principal: Principal, name: str) -> EngineHandle:
        """`engine`, for information about it.

        Raises:
            ForbiddenError: `principal` may not use it. Also raises the errors of `engine`.
        """
        handle = self.engine(name)
        self.check_model(principal, handle.name)
        return handle

    def check_model(self, principal: Principal, name: str) -> None:
        """Raises ForbiddenError if `principal` may not use the model `name`."""
        self._quotas.check_model(principal, name)

    @asynccontextmanager
    async def generate(
        self,
        request_input: RequestInput,
        *,
        principal: Principal,
        deadline: float | None = None,
        engine: EngineHandle | None = None,
    ) -> AsyncIterator[OutputStream]:
        """Run a request input; leaving the context early ends the request within a step.

        Args:
            principal: the caller.
            engine: the engine to use, which the caller has leased; None: that of the input's model.
            deadline: time.monotonic() after which the request ends with DeadlineError.

        Raises:
            TrtcError: the request is not admitted. Later errors are raised by the stream.
        """
        with ExitStack() as held:
            handle = engine or held.enter_context(self.models.lease(request_input.model))
            clock = self.metrics.clock(handle.name, time.monotonic())
            record = held.enter_context(self._audit.recording(principal, handle, request_input))
            timeline = held.enter_context(self.activity.watching(principal, handle.name))
            watchers: list[Watcher] = [timeline] if record is None else [timeline, record]
            if self._telemetry is not None:
                watchers.append(
                    held.enter_context(self._telemetry.recording(handle, request_input))
                )
            with _counted(clock, timeline):
                self.models.check_serves(handle)
                usage = held.enter_context(self._quotas.stream(principal, handle.name))
                place = self._places.take(principal)
                held.callback(self._free, place)
                origin = Origin(principal, deadline, self.limits.share_prefixes)
                progress = Progress(clock, usage, watchers)
                stream = await self._admit(handle, request_input, origin, place, progress)
            try:
                yield stream
            finally:
                self._leave(stream, progress)

    def abort(self, model: str, request_id: str, principal: Principal) -> None:
        """End a running request of `principal`; its stream then finishes with ABORTED.

        Raises:
            UnknownRequestError: the principal has no running request of that id.
        """
        handle = self.engine(model)
        if not handle.loop.abort(request_id, principal):
            raise UnknownRequestError(
                f"no request called {request_id[:100]!r} is running for this client",
                field="request_id",
                remedy="It may have ended; abort a request with the key or certificate, or without "
                "one over the connection, that sent it",
            )

    async def tokenize_text(
        self, model: str, text: str, add_special_tokens: bool, principal: Principal
    ) -> Sequence[int]:
        with self._one_more_call(model, principal) as handle:
            ids = text_ids(
                handle,
                text,
                self.limits.prompts,
                add_special_tokens=add_special_tokens,
                field="text",
            )
            return await self._prompts.run(handle, principal, ids)

    async def tokenize_chat(self, model: str, chat: Chat, principal: Principal) -> Sequence[int]:
        with self._one_more_call(model, principal) as handle:
            ids = chat_ids(handle, chat, self.limits.prompts)
            return await self._prompts.run(handle, principal, ids)

    async def detokenize(
        self,
        model: str,
        token_ids: Sequence[int],
        keep_special_tokens: bool,
        principal: Principal,
    ) -> str:
        with self._one_more_call(model, principal) as handle:
            return await self._prompts.detokenize(
                handle, token_ids, keep_special_tokens=keep_special_tokens
            )

    def info(self, model: str, principal: Principal) -> list[ModelInfo]:
        """The engine called `model`; if `model` is empty, all engines that `principal` may use."""
        if model:
            return [self.engine_for(principal, model).info()]
        may = principal.limits.may_use
        return [handle.info() for handle in self.engines.values() if may(handle.name)]

    def drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self.models.drain()

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no stream is open and no engine holds a request; False after `timeout`
        seconds."""
        deadline = time.monotonic() + timeout
        while self._places.num_taken or self._running:
            self._changed.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                return False
        return True

    @property
    def num_open(self) -> int:
        """Number of open streams, without those whose clients have stopped reading."""
        return self._places.num_taken

    def close(self) -> None:
        """Stop the threads that parse and tokenise; call it after the engine loops have stopped."""
        self.intake.close()
        self._prompts.close()

    def _show_readiness(self) -> None:
        for one in self.models.all():
            self.metrics.ready.labels(one.name).set(not one.reason)
            for level, state in enumerate(SLEEP_STATES):
                self.metrics.sleep_state.labels(one.name, state).set(level == one.sleep_level)
        for gone in self._shown - set(self.models.names):
            self.metrics.ready.remove(gone)
            for state in SLEEP_STATES:
                self.metrics.sleep_state.remove(gone, state)
        self._shown = set(self.models.names)

    def _check_priority(self, request_input: RequestInput, principal: Principal) -> None:
        granted = self.limits.max_priority
        if request_input.priority > granted and not principal.is_trusted:
            raise InvalidRequestError(
                f"is {request_input.priority}; this server grants at most {granted}",
                field="priority",
                remedy=f"Ask for {granted} or less, or start the server with --max-priority",
            )

    @contextmanager
    def _one_more_call(self, model: str, principal: Principal) -> Iterator[EngineHandle]:
        """Count a call that tokenises within the context: it may wait for a thread, so their number
        is limited, to that of streams."""
        with self.models.lease(model) as handle:
            self._quotas.take_request(principal, handle.name)
            place = self._places.take(principal)
            try:
                yield handle
            finally:
                self._free(place)

    async def _admit(
        self,
        handle: EngineHandle,
        request_input: RequestInput,
        origin: Origin,
        place: Place,
        progress: Progress,
    ) -> OutputStream:
        hooked = None
        if self._hooks is None:
            request = await self._request(handle, request_input, origin)
        else:
            from trtc.runtime.service.hooks import HookedRequest

            hooked = HookedRequest(self._hooks, handle.name, request_input, origin.principal)
            request = await self._hooked_request(handle, hooked, origin)
        progress.check(request)

        def abort() -> bool:
            return handle.loop.cancel(number)

        stream = OutputStream(
            abort=abort,
            max_unread_tokens=self.limits.max_unread_tokens,
            on_failure=lambda stream: self._give_up(stream, place),
            on_end=self._forget,
            on_output=lambda stream, outputs, at: progress.deliver(outputs, at),
            prompt_ids=request.prompt_ids,
            edit=None if hooked is None else hooked.outputs(request.n, abort),
            split=splitting(request),
        )
        number = handle.loop.submit(request, lambda delivery: self._courier.post(stream, delivery))
        progress.admit(request)
        self._running.add(stream)
        return stream

    async def _request(
        self, handle: EngineHandle, request_input: RequestInput, origin: Origin
    ) -> GenerationRequest:
        self._check_priority(request_input, origin.principal)
        return await self._prompts.run(
            handle, origin.principal, admission(handle, request_input, origin, self.limits.prompts)
        )

    async def _hooked_request(
        self, handle: EngineHandle, hooked: "HookedRequest", origin: Origin
    ) -> GenerationRequest:
        request_input = await hooked.on_request()
        request = await self._request(handle, request_input, origin)
        edited = await hooked.on_prompt(request_input, request.prompt_ids)
        if edited is not request_input:
            request = await self._request(handle, edited, origin)
        edits = hooked.masks(handle.loop.bounds.vocab_size)
        return replace(request, masks=both_masks(request.masks, edits))

    def _give_up(self, stream: OutputStream, place: Place) -> None:
        """Free the place of a stream whose reader lags; a write to that reader may block for ever,
        and then costs others nothing."""
        if not stream.ended:
            stream.abort()
        self._free(place)

    def _free(self, place: Place) -> None:
        place.free()
        self._changed.set()

    def _leave(self, stream: OutputStream, progress: Progress) -> None:
        if not stream.ended:
            stream.abort()
        if stream.error is not None:
            progress.fail(stream.error)
        elif not stream.ended:
            progress.leave()
        stream.close()

    def _forget(self, stream: OutputStream) -> None:
        self._running.discard(stream)
        self._changed.set()


@contextmanager
def _counted(clock: RequestClock, timeline: Timeline) -> Iterator[None]:
    """Count requests that the block refuses."""
    try:
        yield
    except TrtcError as error:
        clock.refuse(error)
        timeline.refuse()
        raise
