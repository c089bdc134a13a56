"""Inputs run together, one for each prompt of a request; their outputs come as they arrive."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from trtc.protos.errors import CancelledError
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.principal import Principal
from trtc.runtime.requests.request import FinishReason, Output
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.service.service import Service
from trtc.runtime.service.streams import OutputStream

OutputBatch = Sequence[tuple[int, Output]]
"""Outputs that arrived together, each with the number of its prompt."""


@dataclass(frozen=True)
class Running:
    """The running requests of one call."""

    engine: EngineHandle
    """The engine that runs all of them."""
    outputs: AsyncIterator[OutputBatch]


@asynccontextmanager
async def running(
    service: Service, request_inputs: Sequence[RequestInput], principal: Principal
) -> AsyncIterator[Running]:
    """Run request inputs of one model; leaving the context early ends them within a step.

    Raises:
        TrtcError: a request input is refused, which ends those before it.
    """
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(service.models.lease(request_inputs[0].model))
        streams = [
            await stack.enter_async_context(
                service.generate(one, principal=principal, engine=engine)
            )
            for one in request_inputs
        ]
        if len(streams) == 1:
            yield Running(engine, _outputs(0, streams[0]))
            return
        merged = _Merged(streams)
        with merged.reading():
            yield Running(engine, merged.outputs())


async def unaborted(stream: OutputStream) -> AsyncIterator[Sequence[Output]]:
    """The outputs of a request, for protocols whose answers cannot express an abort.

    Raises:
        CancelledError: the request was aborted. Also raises the stream's errors.
    """
    async for outputs in stream:
        for one in outputs:
            if one.finish_reason is FinishReason.ABORTED:
                raise CancelledError("the request was aborted", remedy="Send it again")
        yield outputs


async def _outputs(prompt: int, stream: OutputStream) -> AsyncIterator[OutputBatch]:
    async for outputs in unaborted(stream):
        yield [(prompt, one) for one in outputs]


class _Merged:
    """Merges several streams. Back-pressure: a stream is read only after its last outputs were
    taken, so the unread outputs of a slow reader count against the stream's own limit."""

    def __init__(self, streams: Sequence[OutputStream]) -> None:
        self._streams = streams
        self._arrived: asyncio.Queue[OutputBatch | BaseException | None] = asyncio.Queue(1)

    @contextmanager
    def reading(self) -> Iterator[None]:
        tasks = [
            asyncio.create_task(self._read(prompt, stream))
            for prompt, stream in enumerate(self._streams)
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def outputs(self) -> AsyncIterator[OutputBatch]:
        num_open = len(self._streams)
        while num_open:
            arrived = await self._arrived.get()
            if arrived is None:
                num_open -= 1
            elif isinstance(arrived, BaseException):
                raise arrived
            else:
                yield arrived

    async def _read(self, prompt: int, stream: OutputStream) -> None:
        try:
            async for batch in _outputs(prompt, stream):
                await self._arrived.put(batch)
        except Exception as error:  # noqa: BLE001 (raised where outputs are read)
            await self._arrived.put(error)
            return
        await self._arrived.put(None)
