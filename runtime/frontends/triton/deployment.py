"""One engine behind one Triton model instance: all requests run in the engine's batch.

    Triton's thread   start: tensors -> rows -> loop.submit
    engine's thread   sink ------------------------┐
    reply thread      <- inbox <-------------------┘   messages -> Reply.send
                      every period: cancelled requests end, statistics go out

Every call is answered by messages of which exactly one, the last, is final. Only the reply thread
sends, and only it accesses the live calls.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from trtc.protos.errors import InvalidRequestError, InvariantError, TrtcError
from trtc.runtime.engine.admission import Origin, admission, run_here
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.engine.loop import Delivery, LoopStats
from trtc.runtime.frontends.triton.settings import Settings
from trtc.runtime.requests.naming import as_sent, fields_as_sent
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.requests.validation import validate
from trtc.runtime.tensors.replies import Message, Prompt, RowReplies
from trtc.runtime.tensors.requests import (
    RequestReader,
    RowRequest,
    Tensors,
    asks_to_stop,
)

_log = logging.getLogger("trtc.triton")


class Reply(Protocol):
    """Sends the answers of one call to its client."""

    def send(self, message: Message | TrtcError, *, final: bool) -> None: ...

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled the call."""
        ...


@dataclass(frozen=True)
class Call:
    """One request of Triton."""

    request_id: str
    """The client's id; may be empty, and need not be unique."""
    tensors: Tensors
    timeout_s: float | None
    reply: Reply


@dataclass
class _Row:
    request_id: str
    replies: RowReplies
    sent_as: Mapping[str, str]
    """As in RowRequest."""
    ended: bool = False


@dataclass(eq=False)
class _Exchange:
    """A call and its state."""

    call: Call
    rows: list[_Row] = field(default_factory=list)
    """Set before the first is submitted."""
    ended: bool = False


class Deployment:
    """Answers calls with an engine. Close it to free the engine."""

    def __init__(
        self,
        handle: EngineHandle,
        settings: Settings,
        *,
        on_stats: Callable[[LoopStats], None] = lambda stats: None,
    ) -> None:
        """
        Args:
            on_stats: called from the reply thread once a period, and when the last call has ended.
        """
        self._handle = handle
        self._period_s = settings.cancellation_check_period_ms / 1000
        self._on_stats = on_stats
        self._reader = RequestReader.of(
            handle, exclude_input_in_output=settings.exclude_input_in_output
        )
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: set[_Exchange] = set()
        self._thread = threading.Thread(target=self._run, name="trtc-triton-replies", daemon=True)
        self._thread.start()

    # Triton's thread.

    def start(self, call: Call) -> None:
        """Start a call; errors are sent to its client."""
        if asks_to_stop(call.tensors):
            self._inbox.put(partial(self._stop_others, call))
            return
        exchange = _Exchange(call)
        self._inbox.put(partial(self._live.add, exchange))
        try:
            self._submit(exchange)
        except TrtcError as error:
            self._inbox.put(partial(self._fail, exchange, error))
        except Exception as fault:  # noqa: BLE001 (the client must be answered)
            _log.exception("a request could not be read")
            self._inbox.put(partial(self._fail, exchange, InvariantError(repr(fault))))

    def close(self) -> None:
        """End running requests with UnavailableError and free the engine."""
        self._handle.loop.stop()
        self._inbox.put(None)
        self._thread.join()
        self._handle.close()

    def _submit(self, exchange: _Exchange) -> None:
        """Submit all rows of a call, or none."""
        call, loop = exchange.call, self._handle.loop
        origin = Origin(
            deadline=None if call.timeout_s is None else time.monotonic() + call.timeout_s
        )
        rows = self._reader.read(call.tensors)
        requests = []
        for index, row in enumerate(rows):
            with fields_as_sent(row.sent_as):
                request = run_here(admission(self._handle, row.request_input, origin))
                validate(request, loop.bounds)
            requests.append(request)
            replies = self._replies(row, request, index, len(rows))
            exchange.rows.append(_Row(request.request_id, replies, row.sent_as))
        for row, request, answered in zip(rows, requests, exchange.rows, strict=True):
            with fields_as_sent(row.sent_as):
                loop.submit(request, partial(self._sink, exchange, answered))

    def _sink(self, exchange: _Exchange, row: _Row, delivery: Delivery) -> None:
        self._inbox.put(partial(self._deliver, exchange, row, delivery))

    def _replies(
        self, row: RowRequest, request: GenerationRequest, index: int, num_rows: int
    ) -> RowReplies:
        tokenizer, text = self._handle.tokenizer, row.request_input.text
        if text is None:
            text = tokenizer.decode(request.prompt_ids) if tokenizer and row.with_prompt else ""
        return RowReplies(
            row,
            Prompt(request.prompt_ids, text),
            batch_index=index if num_rows > 1 else None,
            has_text=tokenizer is not None,
        )

    # The reply thread.

    def _run(self) -> None:
        check_at = time.monotonic() + self._period_s
        while True:
            # Without live calls there are no periodic checks.
            wait = max(0.0, check_at - time.monotonic()) if self._live else None
            try:
                action = self._inbox.get(timeout=wait)
            except queue.Empty:
                action = _nothing
            if action is None:
                return
            was_live = bool(self._live)
            self._act(action)
            if time.monotonic() >= check_at or (was_live and not self._live):
                self._act(self._look_after)
                check_at = time.monotonic() + self._period_s

    def _act(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as fault:  # noqa: BLE001 (no call may hang, whatever went wrong)
            _log.exception("the reply thread failed")
            for exchange in list(self._live):
                self._fail(exchange, InvariantError(repr(fault)))

    def _look_after(self) -> None:
        for exchange in list(self._live):
            if exchange.call.reply.is_cancelled():
                self._abort(exchange)
        self._on_stats(self._handle.loop.stats())

    def _stop_others(self, call: Call) -> None:
        """End the running calls of the same id: the stop request of TensorRT-LLM's clients."""
        if not call.request_id:
            error = InvalidRequestError(
                "is empty", field="request_id", remedy="Send that of the request to stop"
            )
            self._send(call, error, final=True)
            return
        for exchange in self._live:
            if exchange.call.request_id == call.request_id:
                self._abort(exchange)
        self._send(call, {}, final=True)

    def _deliver(self, exchange: _Exchange, row: _Row, delivery: Delivery) -> None:
        if exchange.ended:
            return
        if isinstance(delivery, TrtcError):
            self._fail(exchange, as_sent(delivery, row.sent_as))
            return
        messages = row.replies.messages(delivery)
        row.ended = delivery[-1].usage is not None
        exchange.ended = all(one.ended for one in exchange.rows)
        for message in messages:
            self._send(exchange.call, message, final=exchange.ended and message is messages[-1])
        if exchange.ended:
            self._live.discard(exchange)

    def _fail(self, exchange: _Exchange, error: TrtcError) -> None:
        """The first error ends all rows of a call."""
        if exchange.ended:
            return
        exchange.ended = True
        self._live.discard(exchange)
        self._abort(exchange)
        self._send(exchange.call, error, final=True)

    def _abort(self, exchange: _Exchange) -> None:
        for row in exchange.rows:
            if not row.ended:
                self._handle.loop.abort(row.request_id)

    def _send(self, call: Call, message: Message | TrtcError, *, final: bool) -> None:
        try:
            call.reply.send(message, final=final)
        except Exception:  # noqa: BLE001 (one client's fault may not end the others' replies)
            _log.exception("a reply could not be sent")


def _nothing() -> None:
    """Action that only wakes the reply thread for its periodic checks."""
