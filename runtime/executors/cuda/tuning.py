"""Auto-tuning: finds the variants of calls that make a step of each bucket fastest.

Whole steps are timed, because kernels overlap their neighbours: on an H200 a GEMM for o at 64 rows
that was 4% faster alone made the step 5% slower.

Calls that differ only in their tensors form a class and run the same variant. For one class after
another, each variant is timed in the step with the variants chosen so far, alternating with the
step without it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from trtc.protos.launch_plan import (
    Address,
    CallLaunches,
    CollectiveCall,
    KernelCall,
    Matrix,
    ProductCall,
    Tactic,
    TacticTable,
    TileMap,
    Work,
)
from trtc.protos.progress import Progress, Step
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.executors.cuda.buckets import Bucket, Tactics, fitting_variants
from trtc.runtime.executors.cuda.device import Graph
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.executors.cuda.program import Program

_SERIES = 7
_SERIES_SECONDS = 0.02
_MIN_GAIN = 0.005
"""Least relative gain of a step for a variant to be kept. Two graphs of the same step that run
alternately differ by at most 0.2% (H200)."""
_HOPELESS = 1.1
"""A variant that makes one step this many times slower is not timed further: most variants are for
other numbers of rows."""
_PlacedT = TypeVar("_PlacedT", Matrix, TileMap)
Clock = Callable[[], float]


@dataclass(frozen=True)
class CallClass:
    """Calls that run the same code on other tensors."""

    calls: tuple[CallLaunches, ...]

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(call.site for call in self.calls)

    def rows(self, bucket: Bucket) -> int:
        return bucket.extent(self.calls[0].rows)

    def others(self, bucket: Bucket) -> list[int]:
        """The variants that fit a bucket, without the first one, which is the default."""
        return [number for number, _ in fitting_variants(self.calls[0], bucket)][1:]


def tune(executor: CudaExecutor, device: str, progress: Progress) -> TacticTable:
    """Time all variants of all classes in the steps of all buckets with a choice."""
    tactics: list[Tactic] = []
    classes = classes_of(executor.program.calls)
    decided: set[tuple[tuple[str, ...], str, int]] = set()
    for batch in _batches(executor):
        bucket = executor.bucket_of(batch)
        # A class of logit rows has as many in several buckets of mixed steps.
        keys = [(one.sites, bucket.kind, one.rows(bucket)) for one in classes]
        undecided = [one for one, key in zip(classes, keys, strict=True) if key not in decided]
        decided |= set(keys)
        progress(Step(f"{bucket.tokens}-token {bucket.kind} steps"))
        executor.logits(batch)
        tactics += tune_bucket(executor.program, undecided, bucket)
    return TacticTable(device=device, tactics=tuple(tactics))


def tune_bucket(
    program: Program,
    classes: Sequence[CallClass],
    bucket: Bucket,
    clock: Clock = time.perf_counter,
) -> list[Tactic]:
    """The variants that make a step of a bucket faster; the step's inputs must be on the device."""
    kept: list[Tactic] = []
    for one in classes:
        best: Tactic | None = None
        for number in one.others(bucket):
            tried = Tactic(
                sites=one.sites,
                kind=bucket.kind,
                rows=one.rows(bucket),
                variant=number,
                microseconds=0.0,
                default_microseconds=0.0,
            )
            before = [*kept, best] if best else kept
            old, new = _race(program, bucket, (before, [*kept, tried]), clock)
            if new < (1 - _MIN_GAIN) * old:
                best = msgspec.structs.replace(
                    tried,
                    microseconds=round(new, 2),
                    default_microseconds=best.default_microseconds if best else round(old, 2),
                )
        if best:
            kept.append(best)
    return kept


def _race(
    program: Program, bucket: Bucket, runners: Sequence[Sequence[Tactic]], clock: Clock
) -> list[float]:
    """Microseconds of a step with each of two lists of tactics: medians of alternating series,
    unless the second is much slower at once."""
    graphs = [_capture(program, bucket, tactics) for tactics in runners]
    try:
        for graph in graphs:
            graph.replay()  # the first replay uploads the graph
        first = [_seconds(program, graph, 1, clock) for graph in graphs]
        if first[1] > _HOPELESS * first[0]:
            return [seconds * 1e6 for seconds in first]
        repeats = max(1, round(_SERIES_SECONDS / min(first)))
        series = [
            [_seconds(program, graph, repeats, clock) for graph in graphs] for _ in range(_SERIES)
        ]
    finally:
        for graph in graphs:
            graph.drop()
    return [statistics.median(times) * 1e6 for times in zip(*series, strict=True)]


def _capture(program: Program, bucket: Bucket, tactics: Sequence[Tactic]) -> Graph:
    chosen = Tactics(TacticTable(device="", tactics=tuple(tactics)))
    # A first run loads and allocates, which cannot be captured.
    program.run(bucket, chosen)
    return program.device.capture(lambda: program.run(bucket, chosen))


def _seconds(program: Program, graph: Graph, repeats: int, clock: Clock) -> float:
    program.device.wait()
    began = clock()
    for _ in range(repeats):
        graph.replay()
    program.device.wait()
    return (clock() - began) / repeats


def classes_of(calls: Sequence[CallLaunches]) -> list[CallClass]:
    """Classes in the order of their first calls."""
    found: dict[bytes, list[CallLaunches]] = {}
    for call in calls:
        found.setdefault(_code_of(call), []).append(call)
    return [CallClass(tuple(group)) for group in found.values()]


def _code_of(call: CallLaunches) -> bytes:
    """A call without its site and addresses."""
    variants = []
    for variant in call.variants:
        work = tuple(_anywhere(one) for one in variant.work)
        variants.append(msgspec.structs.replace(variant, work=work))
    blank = CallLaunches(site="", rows=call.rows, variants=tuple(variants))
    return msgspec.json.encode(blank, order="sorted")


def _anywhere(work: Work) -> Work:
    """One piece of work without its addresses."""
    nowhere = Address(space="arena")

    def moved(one: _PlacedT) -> _PlacedT:
        return msgspec.structs.replace(one, address=nowhere)

    match work:
        case KernelCall():
            maps = tuple(moved(one) for one in work.maps)
            return msgspec.structs.replace(work, arguments=(), maps=maps)
        case CollectiveCall():
            return msgspec.structs.replace(work, source=nowhere, target=nowhere)
        case ProductCall():
            return msgspec.structs.replace(
                work,
                x=moved(work.x),
                weight=moved(work.weight),
                out=moved(work.out),
                residual=None if work.residual is None else moved(work.residual),
                input_scale=None,
                weight_scale=None,
                bias=None,
                row_scale=None,
            )


def _batches(executor: CudaExecutor) -> Iterator[StepBatch]:
    """A decode step for each decode bucket, and a prefill step for each mixed bucket."""
    limits, size = executor.limits, executor.kv.page_size
    context = min(limits.max_seq_len, 1024, executor.num_pages * size)
    for sequences in _powers(limits.max_batch_size):
        yield _batch(executor, np.full(sequences, context), np.ones(sequences, np.int64))
    for tokens in _powers(limits.max_num_tokens):
        if tokens >= 16:
            lengths = np.full(-(-tokens // context), context)
            lengths[-1] = tokens - context * (len(lengths) - 1)
            if len(lengths) <= limits.max_batch_size:
                yield _batch(executor, lengths, lengths)


def _powers(most: int) -> Iterator[int]:
    extent = 1
    while extent < most:
        yield extent
        extent *= 2
    yield most


def _batch(
    executor: CudaExecutor,
    contexts: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
    new: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
) -> StepBatch:
    """Sequences of `contexts` tokens of which the last `new` are this step's.

    Sequences may share pages if the pool is small: they then read wrong values, at the same speed.
    """
    size = executor.kv.page_size
    width = -(-int(contexts.max()) // size)
    shape = (max(1, len(executor.kv.groups)), len(contexts), width)
    tables = np.arange(np.prod(shape)).reshape(shape) % executor.num_pages
    owners = np.repeat(np.arange(len(contexts)), new)
    ends = np.cumsum(new)
    positions = np.arange(ends[-1]) - np.repeat(ends - contexts, new)
    return StepBatch(
        token_ids=(np.arange(len(positions)) % executor.vocab_size).astype(np.int32),
        positions=positions.astype(np.int32),
        slots=(tables[:, owners, positions // size] * size + positions % size)
        .reshape(-1)
        .astype(np.int32),
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        context_lens=contexts.astype(np.int32),
        page_table=tables.reshape(-1, width).astype(np.int32),
        logit_rows=(ends - 1).astype(np.int32),
    )
