"""What every runtime must be able to do here, and what a run of it gives."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from examples.bench.peers.checkpoint import Shape
from examples.bench.peers.failures import RunFailed
from examples.bench.peers.jobs import RawTrace
from examples.bench.peers.work import Work
from trtc.runtime.bench.measure import Load, Trace, measure

Figures = Mapping[str, float]
"""Names of results.FIGURES -> what one run measured."""


@dataclass(frozen=True)
class Setting:
    """What all contestants share."""

    shape: Shape
    work: Work
    threads: int
    checkpoint: Path
    directory: Path
    """Where what is made of the checkpoint goes, a folder a runtime."""
    logs: Path


class Contestant(Protocol):
    """One engine: a runtime with the checkpoint in one element type.

    Every method starts fresh processes, and raises RunFailed when one of them fails. `seed` is
    another one each time: nothing that an earlier run left may answer.
    """

    @property
    def name(self) -> str: ...

    @property
    def runtime(self) -> str: ...

    @property
    def bits(self) -> int:
        """Of a weight."""

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a decode step reads."""

    def decode(self, batch: int, seed: int) -> Figures:
        """decode_tok_s of `batch` sequences together, prefill_tok_s, peak_rss_bytes."""

    def start(self, seed: int) -> Figures:
        """first_token_s from the start of a process, with its files in the page cache."""

    def streams(self, seed: int) -> Figures:
        """stream_tok_s, ttft_p50_ms, itl_p99_ms and peak_rss_bytes of concurrent requests."""

    def chat(self, seed: int, *, reuse: bool) -> Figures:
        """chat_s, with or without what earlier turns left in a cache."""


def steady_rate(traces: list[Trace]) -> float:
    """Tokens a second while every request decodes: from the last first token to the first end.

    Raises:
        RunFailed: there was no such time.
    """
    begin = max(trace.arrivals[0][0] for trace in traces)
    end = min(trace.arrivals[-1][0] for trace in traces)
    if end <= begin:
        raise RunFailed("the first request ended before the last one had begun to decode")
    tokens = sum(count for trace in traces for at, count in trace.arrivals if begin < at <= end)
    return tokens / (end - begin)


def decode_figures(raw: list[RawTrace], prompt_len: int, peak_rss: int) -> Figures:
    """Of requests that were sent together; the prefill is over with the last first token."""
    traces = [Trace(each.sent_at, each.arrivals) for each in raw]
    prefill_s = max(trace.arrivals[0][0] for trace in traces) - min(
        trace.sent_at for trace in traces
    )
    return {
        "decode_tok_s": steady_rate(traces),
        "prefill_tok_s": len(traces) * prompt_len / prefill_s,
        "peak_rss_bytes": peak_rss,
    }


def stream_figures(raw: list[RawTrace], peak_rss: int) -> Figures:
    """End to end: output tokens over the time from the first request to the last token."""
    traces = [Trace(each.sent_at, each.arrivals) for each in raw]
    seconds = max(trace.arrivals[-1][0] for trace in traces) - min(
        trace.sent_at for trace in traces
    )
    result = measure(Load(len(traces), concurrency=len(traces)), traces, seconds)
    return {
        "stream_tok_s": result.output_tokens_per_s,
        "ttft_p50_ms": result.ttft_ms.p50,
        "itl_p99_ms": result.itl_ms.p99,
        "peak_rss_bytes": peak_rss,
    }
