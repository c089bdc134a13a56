"""Sends random prompts under a load and records the arrival of their tokens."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtc.protos.errors import TrtcError, UnknownModelError
from trtc.runtime.bench.measure import Load, Measurement, SchedulerCost, Trace, measure
from trtc.runtime.client import AsyncClient
from trtc.runtime.engine.config import EngineConfig, EngineSource, Opener
from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.host.interpreter import few_collections
from trtc.runtime.requests.model_info import ModelInfo
from trtc.runtime.requests.principal import LOCAL
from trtc.runtime.requests.request import Output
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.service.metrics import ServerMetrics
from trtc.runtime.service.models import Model, Models, ModelState
from trtc.runtime.service.service import Service


@dataclass(frozen=True)
class Shape:
    """Lengths of each request."""

    input_len: int
    """Random prompt tokens."""
    output_len: int
    """New tokens; end-of-sequence tokens are ignored."""
    seed: int = 0


class Target(Protocol):
    """The system under load."""

    async def info(self) -> ModelInfo: ...

    def stream(self, request_input: RequestInput) -> AsyncIterator[Output]: ...

    def stats(self) -> LoopStats | None:
        """Statistics of the engine's loop, if it is in this process; else None."""
        ...


class ServerTarget:
    """A running server."""

    def __init__(self, client: AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def info(self) -> ModelInfo:
        infos = await self._client.info(self._model)
        if len(infos) != 1:
            raise UnknownModelError(
                f"the server has {len(infos)} engines",
                field="--model",
                remedy=f"Choose one of: {', '.join(info.name for info in infos)}",
            )
        return infos[0]

    def stream(self, request_input: RequestInput) -> AsyncIterator[Output]:
        return self._client.submit(request_input)

    def stats(self) -> None:
        return None


class LocalTarget:
    """An engine in this process, without gRPC."""

    def __init__(self, service: Service, name: str, stats: Callable[[], LoopStats]) -> None:
        self._service = service
        self._name = name
        self._stats = stats

    async def info(self) -> ModelInfo:
        return self._service.info(self._name, LOCAL)[0]

    async def stream(self, request_input: RequestInput) -> AsyncIterator[Output]:
        async with self._service.generate(request_input, principal=LOCAL) as stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    def stats(self) -> LoopStats:
        return self._stats()


@asynccontextmanager
async def local_target(
    engine: Path, config: EngineConfig, opener: Opener
) -> AsyncIterator[LocalTarget]:
    """Context manager that opens `engine` in this process."""
    name = engine.resolve().name
    models = Models([name])
    service = Service(models, ServiceLimits(), ServerMetrics())
    handle = await asyncio.to_thread(opener, EngineSource(name, engine), config)
    try:
        models.put(Model(name, ModelState.READY, engine=handle))
        with few_collections():
            yield LocalTarget(service, name, handle.loop.stats)
    finally:
        await asyncio.to_thread(handle.loop.stop)
        service.close()
        handle.close()


async def run_load(target: Target, load: Load, shape: Shape) -> Measurement:
    """Send `load.num_requests` requests and measure them."""
    info = await target.info()
    prompts = random.Random(shape.seed)
    request_inputs = [_input(prompts, info, shape) for _ in range(load.num_requests)]
    before, begin = target.stats(), time.perf_counter()
    if load.rate is None:
        assert load.concurrency is not None
        traces = await _closed_loop(target, request_inputs, load.concurrency)
    else:
        traces = await _open_loop(target, request_inputs, load.rate, shape.seed)
    seconds, after = time.perf_counter() - begin, target.stats()
    scheduler = SchedulerCost.between(before, after) if before and after else None
    return measure(load, traces, seconds, scheduler)


async def _closed_loop(
    target: Target, request_inputs: list[RequestInput], concurrency: int
) -> list[Trace]:
    """Each of `concurrency` workers sends its next request when its last one has ended."""
    waiting = iter(request_inputs)
    traces: list[Trace] = []

    async def work() -> None:
        for request_input in waiting:
            traces.append(await trace_request(target, request_input))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return traces


async def _open_loop(
    target: Target, request_inputs: list[RequestInput], rate: float, seed: int
) -> list[Trace]:
    """Send requests at random arrival times, which are drawn in advance, so that a slow server does
    not delay them."""
    clock = random.Random(seed)
    at, traces = time.perf_counter(), []

    async def arrive(request_input: RequestInput, when: float) -> None:
        await asyncio.sleep(max(when - time.perf_counter(), 0))
        traces.append(await trace_request(target, request_input))

    async with asyncio.TaskGroup() as group:
        for request_input in request_inputs:
            group.create_task(arrive(request_input, at))
            at += clock.expovariate(rate)
    return traces


async def trace_request(target: Target, request_input: RequestInput) -> Trace:
    """Send one request and record the arrival of its tokens, or its failure."""
    trace = Trace(sent_at=time.perf_counter())
    try:
        async for output in target.stream(request_input):
            if output.token_ids:
                trace.arrivals.append((time.perf_counter(), len(output.token_ids)))
    except TrtcError as error:
        trace.failure = type(error).__name__
    return trace


def _input(prompts: random.Random, info: ModelInfo, shape: Shape) -> RequestInput:
    return RequestInput(
        token_ids=tuple(prompts.randrange(info.vocab_size) for _ in range(shape.input_len)),
        model=info.name,
        sampling={"temperature": 0.0},
        max_tokens=shape.output_len,
        ignore_eos=True,
    )
