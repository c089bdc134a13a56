"""Times steps of an opened CUDA engine: decodes at a context, prefills, without a scheduler.

The clock is the host's, over many steps in a row, as a server runs them.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from examples.bench.batches import decode_batch, prefill_batches
from examples.bench.peers.gpu_work import DECODE_CONTEXT, FIRST_TOKEN_LENGTH
from examples.bench.step_bytes import kv_bytes_read, weight_bytes_read
from trtc.protos.manifest import PLAN_FILE
from trtc.protos.plan import read_plan
from trtc.runtime.engine.session import Session, open_session
from trtc.runtime.executors.base import Executor, PendingStep, StepBatch
from trtc.runtime.sampling.sampler import SamplingBatch

REPEATS = 5
"""Medians are over so many series of steps."""
COPY_BYTES_PER_S = 4.24e12
"""Device copy of an H200, read and write: what a decode step's floor is reckoned by."""

Kind = TypeVar("Kind", bound=Executor)


@dataclass(frozen=True)
class Timing:
    """One workload."""

    milliseconds: float
    """Of a step: the median series'."""
    fastest: float
    slowest: float


@contextmanager
def opened(engine: Path, kind: type[Kind], **options: Any) -> Iterator[tuple[Session, Kind]]:
    """An engine whose executor is a `kind`, for the time of the block."""
    began = time.perf_counter()
    session = open_session(engine, **options)
    assert isinstance(session.executor, kind)
    print(f"{engine.name}: opened in {time.perf_counter() - began:.2f} s", flush=True)
    try:
        yield session, session.executor
    finally:
        session.close()
        gc.collect()


def time_engine(
    name: str,
    session: Session,
    *,
    batches: Sequence[int],
    prefills: Sequence[tuple[int, int]],
    prefill_floor: float | None = None,
    vllm_ms: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """Decodes at DECODE_CONTEXT, prefills and the TTFT of an engine, printed as they come.

    A decode's floor is the weights, keys and values that one GPU reads, at COPY_BYTES_PER_S; of the
    embedding table, the rows of its tokens; of experts, those that are chosen (step_bytes.py).

    Args:
        batches: sequences of each decode.
        prefills: sequences and their length.
        prefill_floor: tokens a second that the hardware allows.
        vllm_ms: vLLM's step by batch.
    """
    executor = session.executor
    plan = read_plan(session.path / PLAN_FILE)
    sequence_bytes = kv_bytes_read(executor.kv, DECODE_CONTEXT)
    result: dict[str, Any] = {"name": name, "decode_ms": {}, "prefill_tok_s": {}}
    for batch in batches:
        timing = time_decode(executor, batch, DECODE_CONTEXT)
        read = weight_bytes_read(plan, batch) + batch * sequence_bytes
        floor = read / COPY_BYTES_PER_S * 1e3
        peer = (vllm_ms or {}).get(batch)
        result["decode_ms"][batch] = {**vars(timing), "floor": floor, "vllm": peer}
        beside = f"   vLLM {peer:.2f} ({peer / timing.milliseconds:.2f}x)" if peer else ""
        print(
            f"  {name} decode {batch:3}: {timing.milliseconds:6.2f} ms"
            f" [{timing.fastest:.2f}-{timing.slowest:.2f}]   floor {floor:.2f}"
            f" ({floor / timing.milliseconds:.0%}){beside}",
            flush=True,
        )
    for sequences, length in prefills:
        timing = time_prefill(executor, sequences, length)
        rate = sequences * length / timing.milliseconds * 1e3
        result["prefill_tok_s"][f"{sequences}x{length}"] = rate
        share = f" ({rate / prefill_floor:.0%} of the fp8 GEMMs' bound)" if prefill_floor else ""
        print(f"  {name} prefill {sequences} x {length}: {rate:,.0f} tok/s{share}", flush=True)
    timing = time_prefill(executor, 1, FIRST_TOKEN_LENGTH)
    result["ttft_4096_ms"] = vars(timing)
    print(f"  {name} TTFT of {FIRST_TOKEN_LENGTH} tokens: {timing.milliseconds:.1f} ms", flush=True)
    return result


def time_decode(executor: Executor, sequences: int, context: int, steps: int = 30) -> Timing:
    batch = decode_batch(executor, sequences, context)

    def series() -> float:
        _run_ahead(executor, [batch] * steps)
        return steps

    return _time(series)


def time_prefill(executor: Executor, sequences: int, length: int) -> Timing:
    """A "step" is all steps of the prompts."""
    batches = prefill_batches(executor, sequences, length)

    def series() -> float:
        _run_ahead(executor, batches)
        return 1

    return _time(series)


def _run_ahead(executor: Executor, batches: Sequence[StepBatch]) -> None:
    """As a server does: one step in flight ahead of the one that is waited for."""
    pending: deque[PendingStep] = deque()
    for batch in batches:
        pending.append(executor.launch(batch, SamplingBatch.greedy(len(batch.logit_rows))))
        if len(pending) == 2:
            pending.popleft().wait()
    while pending:
        pending.popleft().wait()


def _time(series: Callable[[], float]) -> Timing:
    """Milliseconds a step; the first series captures the graphs and does not count."""
    series()
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        steps = series()
        found.append((time.perf_counter() - began) * 1e3 / steps)
    return Timing(statistics.median(found), min(found), max(found))
