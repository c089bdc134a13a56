"""Measures on the GPU which variant of each call is fastest in each bucket.

Calls that differ in nothing but their tensors are one class: they are timed together, one after
another as in a step, so that every one reads its own weights from memory and not from a cache.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from trtc.protos.launches import (
    Address,
    CallLaunches,
    CallVariant,
    CollectiveCall,
    KernelCall,
    ProductCall,
    Tactic,
    TacticTable,
    Work,
)
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.executors.cuda.buckets import Bucket, fitting_variants
from trtc.runtime.executors.cuda.executor import CudaExecutor

_SERIES = 7
_MIN_GAIN = 0.1
"""A variant must be so much faster than the default to be chosen. Calls are timed alone: in a step
one that overlaps its neighbours saves more than that shows (on an H200 a gain of 4% for o at 64
rows, by cuBLASLt, made the whole step 5% slower)."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Class:
    """Calls that run the same code on other tensors."""

    calls: tuple[CallLaunches, ...]

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(call.site for call in self.calls)


def tune(executor: CudaExecutor, device: str, progress: Progress) -> TacticTable:
    """Time every variant of every class in every bucket where there is a choice."""
    tactics: list[Tactic] = []
    classes = _classes(executor.program.calls)
    for batch in _batches(executor):
        bucket = executor.bucket_of(batch)
        executor.logits(batch)
        for one in classes:
            fitting = list(fitting_variants(one.calls[0], bucket))
            if len(fitting) > 1:
                progress(f"{bucket.kind} of {bucket.tokens} tokens  {one.sites[0]}")
                tactics += _measure(executor, one, fitting, bucket)
    return TacticTable(device=device, tactics=tuple(tactics))


def _measure(
    executor: CudaExecutor, one: _Class, fitting: Sequence[tuple[int, CallVariant]], bucket: Bucket
) -> Iterator[Tactic]:
    times = {number: _time(executor, one, number, bucket) / len(one.calls) for number, _ in fitting}
    default = fitting[0][0]
    best = min(times, key=lambda number: times[number])
    if times[best] < (1 - _MIN_GAIN) * times[default]:
        yield Tactic(
            sites=one.sites,
            kind=bucket.kind,
            rows=bucket.extent(one.calls[0].rows),
            variant=best,
            microseconds=round(times[best], 2),
            default_microseconds=round(times[default], 2),
        )


def _time(executor: CudaExecutor, one: _Class, number: int, bucket: Bucket) -> float:
    """Microseconds for all calls of a class: the median over series of replays."""
    program = executor.program

    def work() -> None:
        for call in one.calls:
            program.run_call(call, call.variants[number], bucket)

    work()
    graph = program.device.capture(work)
    found = []
    for _ in range(_SERIES):
        program.device.wait()
        began = time.perf_counter()
        for _ in range(3):
            graph.replay()
        program.device.wait()
        found.append((time.perf_counter() - began) / 3 * 1e6)
    return statistics.median(found)


def _classes(calls: Sequence[CallLaunches]) -> list[_Class]:
    found: dict[bytes, list[CallLaunches]] = {}
    for call in calls:
        found.setdefault(_code_of(call), []).append(call)
    return [_Class(tuple(group)) for group in found.values()]


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
    match work:
        case KernelCall():
            return msgspec.structs.replace(work, arguments=())
        case CollectiveCall():
            return msgspec.structs.replace(work, source=nowhere, target=nowhere)
        case ProductCall():
            return msgspec.structs.replace(
                work,
                x=msgspec.structs.replace(work.x, address=nowhere),
                weight=msgspec.structs.replace(work.weight, address=nowhere),
                out=msgspec.structs.replace(work.out, address=nowhere),
                input_scale=None,
                weight_scale=None,
                bias=None,
            )


def _batches(executor: CudaExecutor) -> Iterator[StepBatch]:
    """One decode step a decode bucket, and one prefill step a mixed bucket."""
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

    Sequences may share pages when the pool is small: what they read then means nothing, and takes
    as long.
    """
    size = executor.kv.page_size
    width = -(-int(contexts.max()) // size)
    table = np.arange(len(contexts) * width).reshape(len(contexts), width) % executor.num_pages
    owners = np.repeat(np.arange(len(contexts)), new)
    ends = np.cumsum(new)
    positions = np.arange(ends[-1]) - np.repeat(ends - contexts, new)
    return StepBatch(
        token_ids=(np.arange(len(positions)) % executor.vocab_size).astype(np.int32),
        positions=positions.astype(np.int32),
        slots=(table[owners, positions // size] * size + positions % size).astype(np.int32),
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        context_lens=contexts.astype(np.int32),
        page_table=table.astype(np.int32),
        logit_rows=(ends - 1).astype(np.int32),
    )
