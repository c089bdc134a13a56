"""A server under a mixed load for minutes: nothing fails or stands still, and memory stays.

    python -m examples.bench.soak ENGINE --minutes 30 [--kv-bytes N] [--dummy-weights]

Prompts have one token to a third of the engine's length, some of them a beginning in common; some
requests ask for several sequences, all draw in different ways, some are cancelled by their client
and some have a deadline that they may miss. With a small `--kv-bytes` sequences are preempted.
Exit status 1: a request failed or came with another number of tokens than it asked for, a stream
stood still, pages were not given back, or memory of the process or the GPU grew after the first
quarter.
"""

import argparse
import asyncio
import math
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from examples.bench.peers.processes import current_rss
from examples.bench.served import TrtcServer, trtc_server
from trtc.protos.errors import DeadlineError, TrtcError
from trtc.protos.sampling import SamplingOptions
from trtc.runtime.client import AsyncClient
from trtc.runtime.client.aio import AsyncGeneration
from trtc.runtime.requests.model_info import ModelInfo
from trtc.runtime.requests.request import Output
from trtc.runtime.requests.request_input import RequestInput

STALLED_S = 120.0
"""A stream that gives nothing for so long stands still; a queue may be long."""
GROWTH, GROWTH_BYTES = 0.02, 64 << 20
"""Memory may vary by the larger of the two after the first quarter."""
_PREFIXES, _PREFIX_SHARE, _CANCELLED_SHARE, _DEADLINE_SHARE = 4, 0.3, 0.1, 0.05
_SAMPLINGS = (
    SamplingOptions(temperature=0.0),
    SamplingOptions(temperature=0.8, top_p=0.95),
    SamplingOptions(temperature=1.0, top_k=50, min_p=0.02),
    SamplingOptions(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.2),
)


@dataclass(frozen=True)
class Ask:
    """A request, and what its client will do about it."""

    request_input: RequestInput
    cancel_after: int | None
    """Tokens after which it is cancelled."""
    timeout: float | None

    @property
    def num_tokens(self) -> int:
        assert self.request_input.max_tokens is not None
        return self.request_input.n * self.request_input.max_tokens


@dataclass
class Tally:
    """What came of the requests."""

    completed: int = 0
    cancelled: int = 0
    late: int = 0
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        ended = f"{self.completed} completed, {self.cancelled} cancelled, {self.late} too late"
        return f"{ended}, {sum(self.failures.values())} failed"


@dataclass(frozen=True)
class Reading:
    """The server at one moment."""

    seconds: float
    rss: int
    """Bytes of the process."""
    gpu: int
    """Bytes in use on all GPUs; 0 without one."""


def asks(info: ModelInfo, seed: int) -> Iterator[Ask]:
    """Requests without end."""
    rng = random.Random(seed)
    longest = max(2, info.max_seq_len // 3)
    prefixes = [_tokens(rng, info, longest // 2) for _ in range(_PREFIXES)]
    while True:
        prompt = _tokens(rng, info, _log_uniform(rng, longest // 2))
        if rng.random() < _PREFIX_SHARE:
            prompt = rng.choice(prefixes) + prompt
        sampling = rng.choice(_SAMPLINGS)
        most = _log_uniform(rng, longest)
        request_input = RequestInput(
            token_ids=prompt,
            model=info.name,
            sampling=sampling,
            max_tokens=most,
            ignore_eos=True,
            n=rng.choice((1, 1, 2)) if sampling["temperature"] else 1,
            priority=rng.choice((0, 0, -1)),
        )
        is_cancelled = rng.random() < _CANCELLED_SHARE
        yield Ask(
            request_input,
            cancel_after=rng.randint(1, most) if is_cancelled else None,
            timeout=rng.uniform(0.05, 5.0) if rng.random() < _DEADLINE_SHARE else None,
        )


def _tokens(rng: random.Random, info: ModelInfo, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(info.vocab_size) for _ in range(count))


def _log_uniform(rng: random.Random, most: int) -> int:
    return min(most, int(math.exp(rng.uniform(0.0, math.log(most + 1)))))


async def complete(client: AsyncClient, ask: Ask, tally: Tally) -> None:
    """One request to its end, whichever it is."""
    tokens = 0
    try:
        async with client.submit(ask.request_input, timeout=ask.timeout) as generation:
            while (output := await _next(generation)) is not None:
                tokens += len(output.token_ids)
                tally.tokens += len(output.token_ids)
                if ask.cancel_after is not None and tokens >= ask.cancel_after:
                    tally.cancelled += 1
                    return
    except TrtcError as error:
        if ask.timeout is not None and isinstance(error, DeadlineError):
            tally.late += 1
        else:
            tally.failures[f"{type(error).__name__}: {error}"] += 1
    except TimeoutError:
        tally.failures[f"no token for {STALLED_S:.0f} s"] += 1
    else:
        if tokens == ask.num_tokens:
            tally.completed += 1
        else:
            tally.failures["another number of tokens than asked for"] += 1


async def _next(generation: AsyncGeneration) -> Output | None:
    """None: it has ended."""
    try:
        return await asyncio.wait_for(anext(generation), STALLED_S)
    except StopAsyncIteration:
        return None


async def load(
    served: TrtcServer, tally: Tally, *, seconds: float, streams: int, seed: int
) -> None:
    """`streams` clients, each with one request after another, until the time is over."""
    ends_at = time.monotonic() + seconds
    async with AsyncClient(served.address) as client:
        requests = asks((await client.info())[0], seed)

        async def work() -> None:
            while time.monotonic() < ends_at and served.server.process.poll() is None:
                await complete(client, next(requests), tally)

        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(work())


async def watch(served: TrtcServer, tally: Tally, readings: list[Reading], every: float) -> None:
    """Write readings down and print a line of each, until cancelled."""
    began, before = time.monotonic(), 0
    while True:
        await asyncio.sleep(every)
        seconds = time.monotonic() - began
        # Beside the clients, which would wait for it.
        gpu, scraped = await asyncio.to_thread(lambda: (gpu_bytes(), metrics(served)))
        reading = Reading(seconds, current_rss(served.server.process.pid), gpu)
        readings.append(reading)
        rate = (tally.tokens - before) / every
        before = tally.tokens
        print(
            f"  {seconds:6.0f} s: {tally.line()}; {rate:,.0f} output tok/s; "
            f"{scraped['trtc_num_preemptions_total']:.0f} preemptions; "
            f"process {reading.rss / 1e9:.2f} GB, GPU {reading.gpu / 1e9:.2f} GB",
            flush=True,
        )


def metrics(served: TrtcServer) -> dict[str, float]:
    """Samples by name; of one engine, so that labels say nothing more."""
    with urllib.request.urlopen(served.metrics_url, timeout=30) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {one.name: one.value for family in families for one in family.samples}


def gpu_bytes() -> int:
    """Bytes in use on all GPUs; 0 where there is none."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return sum(int(line) << 20 for line in said.splitlines())


def problems(tally: Tally, readings: Sequence[Reading], pages_left: float) -> list[str]:
    """What was not as it should be."""
    found = [f"{count} x {what}" for what, count in tally.failures.items()]
    if not tally.completed:
        found.append("no request was completed")
    if pages_left:
        found.append(f"{pages_left:.0f} KV pages were not given back")
    later = readings[len(readings) // 4 :]
    for name, values in (
        ("process", [one.rss for one in later]),
        ("GPU", [one.gpu for one in later]),
    ):
        if values and values[-1] - values[0] > max(GROWTH * values[0], GROWTH_BYTES):
            found.append(f"memory of the {name} grew from {values[0]:,} to {values[-1]:,} bytes")
    return found


async def soak(
    served: TrtcServer, *, seconds: float, streams: int, seed: int
) -> tuple[Tally, list[str]]:
    """The load, and what was wrong about it."""
    tally, readings = Tally(), list[Reading]()
    watching = asyncio.create_task(watch(served, tally, readings, max(1.0, seconds / 20)))
    try:
        await load(served, tally, seconds=seconds, streams=streams, seed=seed)
    finally:
        watching.cancel()
    status = served.server.process.poll()
    if status is not None:
        return tally, [*problems(tally, readings, 0), f"the server ended with {status}"]
    return tally, problems(tally, readings, await _pages_left(served))


async def _pages_left(served: TrtcServer) -> float:
    """KV pages that requests hold when all have ended; cancelled ones may take a step."""
    for _ in range(100):
        held = metrics(served)["trtc_kv_pages_used"]
        if not held:
            break
        await asyncio.sleep(0.1)
    return held


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--kv-bytes", type=int, help="of the pool; small ones preempt")
    parser.add_argument("--dummy-weights", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    options = [] if given.kv_bytes is None else ["--kv-bytes", str(given.kv_bytes)]
    options += ["--dummy-weights"] if given.dummy_weights else []
    with trtc_server(given.engine, *options) as served:
        tally, wrong = asyncio.run(
            soak(served, seconds=60 * given.minutes, streams=given.streams, seed=given.seed)
        )
    print(f"{tally.line()}; {tally.tokens:,} tokens")
    for problem in wrong:
        print(f"WRONG: {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
