"""Activity of the last minutes: one sample per second, and the most recent requests.

    loops' statistics ─┐
                       ├─► sample, once a second ─► ring of MAX_SAMPLES ─► snapshot(after)
    timelines ─────────┘   └─► of those that have ended, the last MAX_ENDED

Memory is bounded whatever clients do, and engine steps have no overhead.
"""

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.requests.principal import Principal
from trtc.runtime.service.latencies import percentiles, size_of
from trtc.runtime.service.progress import LEFT
from trtc.runtime.service.timeline import RequestTimes, Timeline

SAMPLE_S = 1.0
MAX_SAMPLES = 600
MAX_ENDED = 256
MAX_RUNNING_SHOWN = 64
"""Most running requests in an excerpt: the latest ones."""
MAX_CLIENTS = 64
"""Most clients that are counted by name; further ones count as OTHERS."""
OTHERS = "others"
LATENCY_WINDOW = 10
"""Samples over which percentiles are computed."""
LATENCIES = ("first_token", "between_tokens", "queue")
SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Series:
    """A column of an engine's samples."""

    name: str
    value: Callable[[LoopStats], float]
    is_rate: bool = False
    """Whether the column is the value's rate per second, instead of the value."""


SERIES = (
    Series("running", lambda r: r.running),
    Series("waiting", lambda r: r.waiting),
    Series("kv_pages_used", lambda r: r.pages_used),
    Series("kv_pages_cached", lambda r: r.pages_cached),
    Series("generated_tokens", lambda r: r.generated_tokens, is_rate=True),
    Series("prompt_tokens", lambda r: r.prompt_tokens, is_rate=True),
    Series("prefix_queries", lambda r: r.prefix_query_tokens, is_rate=True),
    Series("prefix_hits", lambda r: r.prefix_hit_tokens, is_rate=True),
    Series("preemptions", lambda r: r.preemptions, is_rate=True),
    Series("drafts", lambda r: r.draft_tokens, is_rate=True),
    Series("accepted_drafts", lambda r: r.accepted_draft_tokens, is_rate=True),
    Series("steps", lambda r: r.steps, is_rate=True),
    Series("busy", lambda r: r.step_seconds, is_rate=True),
)
OUTCOMES = ("finished", "left", "failed", "refused")
COLUMNS = (
    *(one.name for one in SERIES),
    *OUTCOMES,
    *(f"{name}_p{share * 100:.0f}" for name in LATENCIES for share in SHARES),
)
"""Columns of an engine's sample. Rates are per second, durations in seconds."""


class ClientTotals(msgspec.Struct):
    """Totals of a client since the server's start."""

    name: str
    running: int = 0
    """Requests that engines run or queue now."""
    requests: int = 0
    refused: int = 0
    left: int = 0
    """Requests whose client disconnected before their end."""
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Sample(msgspec.Struct, frozen=True):
    at: float
    """time.monotonic()."""
    engines: Mapping[str, Sequence[float | None]]
    """Engine -> a value for each of COLUMNS; None: undefined, such as a percentile without
    observations."""
    clients: Mapping[str, float]
    """Client -> completion tokens per second; no zeros."""


@dataclass(frozen=True)
class Snapshot:
    """An excerpt of the activity."""

    num_samples: int
    """Number of samples since the server's start: `after` of the next excerpt."""
    samples: Sequence[Sample]
    running: Sequence[RequestTimes]
    ended: Sequence[RequestTimes]
    clients: Sequence[ClientTotals]


@dataclass
class _Engine:
    """Counts of one engine since the last sample."""

    outcomes: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, deque[Counter[int]]] = field(
        default_factory=lambda: {
            name: deque([Counter[int]()], maxlen=LATENCY_WINDOW) for name in LATENCIES
        }
    )
    """Name of a duration -> counts of the last seconds; the last is the current second."""

    def add(self, name: str, seconds: float) -> None:
        self.latencies[name][-1][size_of(seconds)] += 1

    def next_second(self) -> None:
        self.outcomes.clear()
        for window in self.latencies.values():
            window.append(Counter())


class Activity:
    """Records activity. Used in the service's asyncio loop only."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._numbers = itertools.count(1)
        self._running: dict[int, Timeline] = {}
        self._ended: deque[tuple[int, RequestTimes]] = deque(maxlen=MAX_ENDED)
        """(number of samples before its end, request) of the last ended requests."""
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._num_samples = 0
        self._sampled_at = now()
        self._before: Mapping[str, LoopStats] = {}
        self._engines: dict[str, _Engine] = {}
        self._clients: dict[str, ClientTotals] = {}
        self._tokens_before: dict[str, int] = {}
        """Client -> completion tokens at the last sample."""

    async def run(self, read: Callable[[], Mapping[str, LoopStats]]) -> None:
        """Take samples of `read()` until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample(read())

    @contextmanager
    def watching(self, principal: Principal, model: str) -> Iterator[Timeline]:
        """Record a request, from its arrival until the context is left."""
        engine = self._engines.setdefault(model, _Engine())
        timeline = Timeline(next(self._numbers), principal, model, self._now, engine.add)
        client = self._client(timeline.client)
        client.requests += 1
        client.running += 1
        self._running[timeline.number] = timeline
        try:
            yield timeline
        finally:
            del self._running[timeline.number]
            client.running -= 1
            timeline.end()
            self._count(timeline, client, engine)

    def sample(self, stats: Mapping[str, LoopStats]) -> None:
        """Add a sample of the engines' state, and of their work since the last sample."""
        now = self._now()
        elapsed = max(now - self._sampled_at, 1e-3)
        engines = {name: self._row(name, one, elapsed) for name, one in stats.items()}
        self._samples.append(Sample(now, engines, self._client_rates(elapsed)))
        self._num_samples += 1
        self._sampled_at, self._before = now, dict(stats)
        for engine in self._engines.values():
            engine.next_second()
        for name in self._engines.keys() - stats.keys():
            if not any(one.model == name for one in self._running.values()):
                del self._engines[name]

    def snapshot(self, after: int = 0) -> Snapshot:
        """The activity after the first `after` samples, as far as it is kept. Requests that ended
        since the last of those may be in two excerpts."""
        if after > self._num_samples:  # from before a restart
            after = 0
        num_new = min(self._num_samples - after, len(self._samples))
        admitted = (one for one in reversed(self._running.values()) if one.is_admitted)
        return Snapshot(
            num_samples=self._num_samples,
            samples=list(self._samples)[len(self._samples) - num_new :],
            running=[one.times() for one in itertools.islice(admitted, MAX_RUNNING_SHOWN)],
            ended=[one for number, one in self._ended if number >= after],
            clients=[msgspec.structs.replace(one) for one in self._clients.values()],
        )

    def _row(self, name: str, stats: LoopStats, elapsed: float) -> Sequence[float | None]:
        before = self._before.get(name, stats)
        engine = self._engines.setdefault(name, _Engine())
        return (
            *(
                # An engine that was opened anew counts from 0 again.
                round(max(one.value(stats) - one.value(before), 0) / elapsed, 4)
                if one.is_rate
                else one.value(stats)
                for one in SERIES
            ),
            *(round(engine.outcomes[name] / elapsed, 4) for name in OUTCOMES),
            *(
                None if value is None else round(value, 7)
                for latency in LATENCIES
                for value in percentiles(engine.latencies[latency], SHARES)
            ),
        )

    def _client_rates(self, elapsed: float) -> Mapping[str, float]:
        # ClientTotals count at the end of a request; here running requests count too.
        tokens = Counter({name: one.completion_tokens for name, one in self._clients.items()})
        for timeline in self._running.values():
            tokens[self._client(timeline.client).name] += timeline.completion_tokens
        rates = {
            name: round((number - self._tokens_before.get(name, 0)) / elapsed, 4)
            for name, number in tokens.items()
            if number > self._tokens_before.get(name, 0)
        }
        self._tokens_before = dict(tokens)
        return rates

    def _client(self, name: str) -> ClientTotals:
        """The totals that a client counts in."""
        if name not in self._clients and len(self._clients) >= MAX_CLIENTS - 1:
            name = OTHERS
        return self._clients.setdefault(name, ClientTotals(name))

    def _count(self, timeline: Timeline, client: ClientTotals, engine: _Engine) -> None:
        client.prompt_tokens += timeline.prompt_tokens
        client.completion_tokens += timeline.completion_tokens
        if timeline.is_refused:
            outcome = "refused"
        elif timeline.outcome == LEFT:
            outcome = "left"
        else:
            outcome = "finished" if timeline.outcome == "ok" else "failed"
        client.refused += outcome == "refused"
        client.left += outcome == "left"
        client.failed += outcome == "failed"
        engine.outcomes[outcome] += 1
        if timeline.is_admitted:
            self._ended.append((self._num_samples, timeline.times()))
