"""Times of requests, and statistics over them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from trtc.runtime.engine.loop import LoopStats


@dataclass
class Trace:
    """Arrival times of one request's tokens, in time.perf_counter()."""

    sent_at: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(time, number of tokens) of each delivery with tokens."""
    failure: str = ""
    """Class of the error that ended it; "": none did."""

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0][0] - self.sent_at

    @property
    def whole_s(self) -> float:
        return self.arrivals[-1][0] - self.sent_at

    @property
    def between_tokens_s(self) -> list[float]:
        """Inter-token latency of each token after the first delivery; tokens that arrive together
        share the gap evenly."""
        gaps: list[float] = []
        for (before, _), (at, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps.extend([(at - before) / tokens] * tokens)
        return gaps


@dataclass(frozen=True)
class Spread:
    """Percentiles in milliseconds; all zero if nothing was measured."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> "Spread":
        if not seconds:
            return cls(0.0, 0.0, 0.0, 0.0)
        values = np.asarray(seconds) * 1e3
        p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
        return cls(float(values.mean()), p50, p95, p99)


@dataclass(frozen=True)
class Load:
    """Closed loop: always `concurrency` requests in flight. Open loop: Poisson arrivals at `rate`
    per second, independent of the answers. Exactly one of the two is set."""

    num_requests: int
    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        """`4 at once`, or `2.5 a second`."""
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"


@dataclass(frozen=True)
class SchedulerCost:
    """Overhead of an engine's loop outside its steps: planning, building, detokenising,
    delivering."""

    ms_a_step: float
    share: float
    """Share of the time in which there was work."""

    @classmethod
    def between(cls, before: LoopStats, after: LoopStats) -> "SchedulerCost":
        work = after.work_seconds - before.work_seconds
        beside = max(0.0, work - (after.step_seconds - before.step_seconds))
        steps = after.steps - before.steps
        return cls(beside / steps * 1e3 if steps else 0.0, beside / work if work else 0.0)


@dataclass(frozen=True)
class Measurement:
    """Statistics of one load over its successful requests."""

    load: Load
    seconds: float
    """Seconds from the first request sent to the end of the last one."""
    completed: int
    failures: dict[str, int]
    """Error class -> number of failed requests."""
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Spread
    """From sending a request to its first token."""
    itl_ms: Spread
    """Between tokens of one request."""
    e2e_ms: Spread
    """From sending a request to its last token."""
    scheduler: SchedulerCost | None = None
    """None for servers, which do not report it."""

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        load = document.pop("load")
        return {**load, **document}


def measure(
    load: Load, traces: Sequence[Trace], seconds: float, scheduler: SchedulerCost | None = None
) -> Measurement:
    good = [trace for trace in traces if not trace.failure and trace.arrivals]
    tokens = sum(trace.num_tokens for trace in good)
    return Measurement(
        load=load,
        seconds=seconds,
        completed=len(good),
        failures=dict(Counter(trace.failure for trace in traces if trace.failure)),
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds,
        requests_per_s=len(good) / seconds,
        ttft_ms=Spread.of_seconds([trace.first_token_s for trace in good]),
        itl_ms=Spread.of_seconds([gap for trace in good for gap in trace.between_tokens_s]),
        e2e_ms=Spread.of_seconds([trace.whole_s for trace in good]),
        scheduler=scheduler,
    )
