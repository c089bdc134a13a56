"""What every engine is asked to do on a GPU, and how its figures follow from the times.

Workers run this in their own environments: nothing but the standard library here.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial

FIRST_TOKEN_LENGTH = 4096
_START_LENGTH = 16
DECODE_CONTEXT = 1024
INPUT_LEN, OUTPUT_LEN = 512, 256
MAX_SEQUENCES, MAX_STEP_TOKENS = 512, 8192
"""What a step takes."""
PARTS = ("start", "prefill", "first token", "decode", "offline")
_BEGIN, _STEPS = 65, 128
"""Tokens after which decodes count, more than the steps that the prompts take; how many count."""
_AGREE = 0.1
"""Runs that differ by less than this part of them have settled."""
_MOST_RUNS = 6
"""After which they are taken as they are."""

Timed = Callable[[int, int, int], float]
"""(requests, prompt tokens, new tokens) -> seconds until all tokens have come, of requests that are
sent at once, greedy, without end-of-sequence tokens; prompts are others each time."""


@dataclass(frozen=True)
class Workload:
    """What a shape is timed with."""

    decodes: tuple[tuple[int, int], ...] = tuple((n, DECODE_CONTEXT) for n in (1, 16, 64, 128, 256))
    """Sequences and their context in tokens."""
    prefills: tuple[tuple[int, int], ...] = ((64, 1024), (32, 4096))
    """Prompts and their length in tokens."""
    offline: tuple[int, int, int] = (512, INPUT_LEN, OUTPUT_LEN)
    """Requests, tokens of each prompt and of each output."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, a decode's second half included."""
        lengths = [length for _, length in (*self.decodes, *self.prefills)]
        return max(MAX_STEP_TOKENS, *(length + _STEPS for length in lengths), sum(self.offline[1:]))


@dataclass(frozen=True)
class GpuJob:
    """What a worker is given on its stdin."""

    model: str
    """An engine, or a checkpoint."""
    fp8_kv: bool
    weights: str
    """`random`: each runtime draws those of trtc's `--dummy-weights`; `zeros`: those of vLLM's
    `--load-format dummy`, which an engine of trtc has in its file."""
    parts: tuple[str, ...]
    """Of PARTS."""
    repeats: int = 3
    workload: Workload = field(default_factory=Workload)
    sent_at: float = field(default_factory=time.time)
    """Seconds since 1970; a process is started for the job then."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_gpu_job() -> GpuJob:
    given = json.load(sys.stdin)
    workload = Workload(
        decodes=_pairs(given["workload"]["decodes"]),
        prefills=_pairs(given["workload"]["prefills"]),
        offline=tuple(given["workload"]["offline"]),
    )
    return GpuJob(**given | {"parts": tuple(given["parts"]), "workload": workload})


def _pairs(given: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((sequences, length) for sequences, length in given)


def measure(timed: Timed, job: GpuJob) -> Iterator[tuple[str, float]]:
    """Names and figures, each as soon as it is there: medians of work that has settled after one
    run, but for the start, which is from the job's being sent until an opened engine has given a
    token."""
    parts, repeats = job.parts, job.repeats
    if "start" in parts:
        timed(1, _START_LENGTH, 1)
        yield "start to first token, s", time.time() - job.sent_at
    if "prefill" in parts:
        for requests, length in job.workload.prefills:
            seconds = _after_one(partial(timed, requests, length, 1), repeats)
            yield f"prefill {requests} x {length}, tok/s", requests * length / seconds
    if "first token" in parts:
        seconds = _after_one(partial(timed, 1, FIRST_TOKEN_LENGTH, 1), 2 * repeats + 1)
        yield f"first token of {FIRST_TOKEN_LENGTH}, ms", seconds * 1e3
    if "decode" in parts:
        for batch, context in job.workload.decodes:
            seconds = decode_seconds(timed, batch, context, repeats)
            yield f"decode of {batch} at {context}, ms", 1e3 * seconds
    if "offline" in parts:
        requests, given, asked = job.workload.offline
        seconds = _after_one(partial(timed, requests, given, asked), repeats)
        name = f"offline {requests} x ({given} in, {asked} out), tok/s"
        yield name, requests * asked / seconds


def decode_seconds(timed: Timed, batch: int, context: int, repeats: int) -> float:
    """Of a step in which `batch` sequences decode, at `context` tokens in the middle.

    Two loads that differ in `_STEPS` tokens a sequence alone: prompts, the steps that they share
    with decodes, and the steps of the sequences that end last are the same in both.
    """
    prompt = context - _BEGIN - _STEPS // 2
    timed(batch, prompt, _BEGIN + _STEPS)

    def steps() -> float:
        return timed(batch, prompt, _BEGIN + _STEPS) - timed(batch, prompt, _BEGIN)

    return settled(steps, repeats) / _STEPS


def settled(run: Callable[[], float], repeats: int) -> float:
    """Median of the last `repeats` runs, two at least, after as many as it takes until two in turn
    agree: an engine that compiles kernels for the shapes that come is slow until it has them."""
    found = [run(), run()]
    while abs(found[-1] - found[-2]) > _AGREE * found[-1] and len(found) < _MOST_RUNS:
        found.append(run())
    found += [run() for _ in range(repeats - 2)]
    return statistics.median(found[-max(2, repeats) :])


def _after_one(run: Callable[[], float], repeats: int) -> float:
    run()
    return settled(run, repeats)
