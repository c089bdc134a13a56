"""Outputs on their way from an engine's thread to the reader of one stream.

    engine thread                       |  asyncio thread
    sink(outputs) -> Courier.post ------+-> flush -> OutputStream -> reader
                     one wake-up a step |   bounded; overflow fails the stream

The engine never waits for a reader: a stream whose unread tokens pass its bound fails and its
request is aborted, so that a client that stops reading costs neither pages nor memory.
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
    """Carries deliveries of any thread into one asyncio loop, waking it once for many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posts: deque[tuple[OutputStream, Delivery, float]] = deque()
        self._woken = False

    def post(self, stream: "OutputStream", delivery: Delivery) -> None:
        """Hand over one delivery; called from any thread, never blocks.

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

    Its owner is called for every delivery (`on_output`), when the reader fails to keep up
    (`on_failure`) and when the engine has released the request (`on_end`). Iterating yields all
    that has arrived since the last time, one Output a sequence or, where
    answers are split, one a token, and ends after the request's last
    Output or raises its error.
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
            edit: what the reader gets in place of outputs, perhaps nothing; what it raises ends the
                request.
            split: gives outputs their parts, after they were edited.
        """
        self.prompt_ids = prompt_ids
        """Of the request, as it was admitted."""
        self.abort = abort
        """Ends the request, if it has not ended."""
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
        """No more outputs are taken: the reader has failed or gone."""
        self._ended = False
        """The engine has released the request."""
        self._arrived = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def error(self) -> TrtcError | None:
        return self._error

    def deliver(self, delivery: Delivery, posted_at: float) -> None:
        """Take one delivery of the engine; `posted_at` is its time.monotonic()."""
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
        """The reader lags: drop what it has not read, and let it find `error` instead."""
        if self._error is None:
            self.close()
            self._error = error
            self._arrived.set()
            self._on_failure(self)

    def close(self) -> None:
        """The reader has gone: drop what it has not read and whatever still comes."""
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
        """All that has arrived since the last time."""
        while not self._pending and self._error is None and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        if self._pending:
            outputs, self._pending, self._unread_tokens = self._pending, [], 0
            # The tokens of thoughts are counted by outputs.
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
    """One Output a sequence, in order of first appearance; usage stays on the very last.

    A reader that keeps up gets its outputs as they are; one that lags gets fewer, longer ones.
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
