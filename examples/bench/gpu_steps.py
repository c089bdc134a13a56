"""Times steps of an opened CUDA engine: decodes at a context, prefills, without a scheduler.

The clock is the host's, over many steps in a row, as a server runs them.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from examples.bench.batches import decode_batch, pages_needed, prefill_batches
from examples.bench.gpu_experts import chosen_shares
from examples.bench.peers.gpu_work import FIRST_TOKEN_LENGTH, Workload
from examples.bench.step_bytes import kv_bytes_read, weight_bytes_read
from trtc.protos.manifest import PLAN_FILE, read_manifest
from trtc.protos.plan import read_plan
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.device.driver_api import DriverApi
from trtc.runtime.engine.session import Session, open_session
from trtc.runtime.executors.base import Executor, PendingStep, StepBatch
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.sampling.sampler import SamplingBatch

REPEATS = 5
"""Medians are over so many series of steps."""
_COPY_BYTES, _COPIES = 4 << 30, 8

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


def copy_bytes_per_s() -> float:
    """Bytes a second that a copy within the GPU's memory reads and writes: what a decode step's
    floor is computed from."""
    device = CudaDriverDevice(DriverApi("cuda"))
    try:
        source, target = device.allocate(_COPY_BYTES), device.allocate(_COPY_BYTES)

        def series() -> float:
            for _ in range(_COPIES):
                device.copy(target, source, _COPY_BYTES)
            device.synchronize()
            return _COPIES

        return 2 * _COPY_BYTES / _time(series).milliseconds * 1e3
    finally:
        device.close()


def pages_for_workload(engine: Path, workload: Workload) -> int:
    """Pages of the pool in which all of a workload's steps have room."""
    manifest = read_manifest(engine)
    step = manifest.limits.max_num_tokens
    prefills = (*workload.prefills, (1, FIRST_TOKEN_LENGTH))
    return max(
        *(pages_needed(manifest.kv, *decode) for decode in workload.decodes),
        *(pages_needed(manifest.kv, *prefill, step) for prefill in prefills),
    )


def time_engine(
    name: str, session: Session, workload: Workload, copy_rate: float
) -> dict[str, Any]:
    """Decodes, prefills and the TTFT of an engine, printed as they come.

    A decode's floor is the weights, keys and values that one GPU reads, at `copy_rate` bytes a
    second; of the embedding table, the rows of its tokens; of experts, those that its rows choose
    (step_bytes.py).
    """
    executor = session.executor
    plan = read_plan(session.path / PLAN_FILE)
    result: dict[str, Any] = {"name": name, "decode_ms": {}, "prefill_tok_s": {}}
    for batch, context in workload.decodes:
        timing = time_decode(executor, batch, context)
        step = decode_batch(executor, batch, context)
        shares = chosen_shares(executor, plan, step) if isinstance(executor, CudaExecutor) else None
        read = weight_bytes_read(plan, batch, shares)
        read += batch * kv_bytes_read(executor.kv, context)
        floor = read / copy_rate * 1e3
        result["decode_ms"][f"{batch}x{context}"] = {**vars(timing), "floor": floor}
        print(
            f"  {name} decode {batch:3} at {context}: {timing.milliseconds:6.2f} ms"
            f" [{timing.fastest:.2f}-{timing.slowest:.2f}]   floor {floor:.2f}"
            f" ({floor / timing.milliseconds:.0%})",
            flush=True,
        )
    for sequences, length in workload.prefills:
        timing = time_prefill(executor, sequences, length)
        rate = sequences * length / timing.milliseconds * 1e3
        result["prefill_tok_s"][f"{sequences}x{length}"] = rate
        print(f"  {name} prefill {sequences} x {length}: {rate:,.0f} tok/s", flush=True)
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
