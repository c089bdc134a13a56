"""Passes outputs from an engine's thread to the reader of one stream.

    engine thread                       |  asyncio thread
    sink(outputs) -> Courier.post ------+-> flush -> OutputStream -> reader
                     one wake-up a step |   bounded; overflow fails the stream

The engine never waits for a reader: if a stream has too many unread tokens it fails and its request
is aborted, so a client that stops reading holds neither pages nor memory.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from trtc.protos.errors import QueueFullError, TrtcError
from trtc.runtime.engine.loop import Delivery
from trtc.runtime.requests.request import Output


class Courier:
    """Passes deliveries from any thread to one asyncio loop, with one wake-up for many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posts: deque[tuple[OutputStream, Delivery, float]] = deque()
        self._woken = False

    def post(self, stream: "OutputStream", delivery: Delivery) -> None:
        """Pass one delivery. Thread-safe; never blocks.

        The append comes before the test, and `_flush` clears the flag before it empties the
        queue, so a post is never left behind without a wake-up.
        """
        self._posts.append((stream, delivery, time.monotonic()))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._woken = False
        while self._posts:
            stream, delivery, posted_at = self._posts.popleft()
            stream.deliver(delivery, posted_at)


class OutputStream:
    """The outputs of one request, read by at most one reader in the asyncio thread.

    Calls its owner for every delivery (`on_output`), if the reader falls behind (`on_failure`) and
    when the engine has released the request (`on_end`). Each iteration yields the outputs that have
    arrived since the last one, one Output per sequence or, if answers are split, one per token. The
    iteration ends after the request's last Output, or raises its error.
    """

    def __init__(
        self,
        *,
        abort: Callable[[], object],
        max_unread_tokens: int,
        on_failure: Callable[["OutputStream"], object],
        on_end: Callable[["OutputStream"], object],
        on_output: Callable[["OutputStream", Sequence[Output], float], object],
        prompt_ids: tuple[int, ...] = (),
        edit: Callable[[Sequence[Output]], Awaitable[list[Output]]] | None = None,
        split: Callable[[Sequence[Output]], list[Output]] | None = None,
    ) -> None:
        """
        Args:
            edit: replaces outputs before they are read, possibly by none; its errors end the
                request.
            split: splits outputs into parts, after `edit`.
        """
        self.prompt_ids = prompt_ids
        """Prompt of the admitted request."""
        self.abort = abort
        """Aborts the request, unless it has ended."""
        self._max_unread_tokens = max_unread_tokens
        self._on_failure = on_failure
        self._on_end = on_end
        self._on_output = on_output
        self._edit = edit
        self._split = split
        self._pending: list[Output] = []
        self._unread_tokens = 0
        self._error: TrtcError | None = None
        self._closed = False
        """Whether outputs are dropped, because the reader has failed or left."""
        self._ended = False
        """Whether the engine has released the request."""
        self._arrived = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def error(self) -> TrtcError | None:
        return self._error

    def deliver(self, delivery: Delivery, posted_at: float) -> None:
        """Receive one delivery of the engine; `posted_at` is its time.monotonic()."""
        assert not self._ended, "an engine loop delivered after the end of a request"
        if isinstance(delivery, TrtcError):
            self._end(delivery)
            return
        self._on_output(self, delivery, posted_at)
        if not self._closed:
            self._keep(delivery)
        if delivery and delivery[-1].usage is not None:
            self._end(None)

    def fail(self, error: TrtcError) -> None:
        """Drop unread outputs, and raise `error` in the reader, which has fallen behind."""
        if self._error is None:
            self.close()
            self._error = error
            self._arrived.set()
            self._on_failure(self)

    def close(self) -> None:
        """Drop unread and later outputs, because the reader has left."""
        self._closed = True
        self._pending.clear()

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> list[Output]:
        outputs = await self._edited()
        return outputs if self._split is None else self._split(outputs)

    async def _edited(self) -> list[Output]:
        if self._edit is None:
            return await self._arrivals()
        while True:
            outputs = await self._arrivals()
            try:
                edited = await self._edit(outputs)
            except TrtcError as error:
                self.fail(error)
                raise
            if edited:
                return edited

    async def _arrivals(self) -> list[Output]:
        """All outputs that have arrived since the last call."""
        while not self._pending and self._error is None and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        if self._pending:
            outputs, self._pending, self._unread_tokens = self._pending, [], 0
            # Not merged: AnswerSplitter counts reasoning tokens by output.
            return outputs if self._split is not None else merge(outputs)
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def _keep(self, outputs: Sequence[Output]) -> None:
        self._pending.extend(outputs)
        for output in outputs:
            self._unread_tokens += len(output.token_ids) + len(output.prompt_logprobs)
        if self._unread_tokens > self._max_unread_tokens:
            self.fail(
                QueueFullError(
                    f"the client left more than {self._max_unread_tokens} tokens unread",
                    field="request_id",
                    remedy="Read the stream as it comes, or ask for fewer tokens",
                )
            )
        self._arrived.set()

    def _end(self, error: TrtcError | None) -> None:
        self._ended = True
        if self._error is None and not self._closed:
            self._error = error
        self._arrived.set()
        self._on_end(self)


def merge(outputs: Sequence[Output]) -> list[Output]:
    """Merge outputs into one per sequence, in order of first appearance; usage stays on the last.

    A reader that lags gets fewer, longer outputs.
    """
    if len(outputs) == 1:
        return list(outputs)
    merged: dict[int, Output] = {}
    usage = None
    for output in outputs:
        usage = output.usage or usage
        before = merged.get(output.index)
        merged[output.index] = output if before is None else _join(before, output)
    if len(merged) == len(outputs):
        return list(outputs)
    joined = [replace(output, usage=None) for output in merged.values()]
    joined[-1] = replace(joined[-1], usage=usage)
    return joined


def _join(before: Output, after: Output) -> Output:
    return replace(
        after,
        token_ids=before.token_ids + after.token_ids,
        text=before.text + after.text,
        logprobs=before.logprobs + after.logprobs,
        prompt_logprobs=before.prompt_logprobs + after.prompt_logprobs,
    )
