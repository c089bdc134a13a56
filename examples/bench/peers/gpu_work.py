"""What every engine is asked to do on a GPU, and how its figures follow from the times.

Workers run this in their own environments: nothing but the standard library here.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

PREFILLS = ((64, 1024), (32, 4096))
"""Prompts and their length."""
FIRST_TOKEN_LENGTH = 4096
_START_LENGTH = 16
DECODE_BATCHES = (1, 16, 64, 128, 256)
DECODE_CONTEXT = 1024
OFFLINE_REQUESTS, INPUT_LEN, OUTPUT_LEN = 512, 512, 256
MAX_SEQUENCES, MAX_TOKENS = 512, 8192
"""What an engine takes: sequences, and tokens of a sequence as of a step."""
PARTS = ("start", "prefill", "first token", "decode", "offline")
_BEGIN, _STEPS = 65, 128
"""Tokens after which decodes count, more than the steps that the prompts take; how many count."""

Timed = Callable[[int, int, int], float]
"""(requests, prompt tokens, new tokens) -> seconds until all tokens have come, of requests that are
sent at once, greedy, without end-of-sequence tokens; prompts are others each time."""


@dataclass(frozen=True)
class GpuJob:
    """What a worker is given on its stdin."""

    model: str
    """An engine, or a checkpoint."""
    fp8_kv: bool
    dummy_weights: bool
    """Whether weights come from the runtime's own way to run without any."""
    parts: tuple[str, ...]
    """Of PARTS."""
    repeats: int = 3
    sent_at: float = field(default_factory=time.time)
    """Seconds since 1970; a process is started for the job then."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_gpu_job() -> GpuJob:
    return GpuJob(**json.load(sys.stdin))


def measure(timed: Timed, job: GpuJob) -> dict[str, float]:
    """Medians of `job.repeats` runs, each kind of work having run once before, but for the start,
    which is from the job's being sent until an opened engine has given a token."""
    found: dict[str, float] = {}
    parts, repeats = job.parts, job.repeats
    if "start" in parts:
        timed(1, _START_LENGTH, 1)
        found["start to first token, s"] = time.time() - job.sent_at
    if "prefill" in parts:
        for requests, length in PREFILLS:
            seconds = _median(partial(timed, requests, length, 1), repeats)
            found[f"prefill {requests} x {length}, tok/s"] = requests * length / seconds
    if "first token" in parts:
        seconds = _median(partial(timed, 1, FIRST_TOKEN_LENGTH, 1), 2 * repeats + 1)
        found[f"first token of {FIRST_TOKEN_LENGTH}, ms"] = seconds * 1e3
    if "decode" in parts:
        for batch in DECODE_BATCHES:
            found[f"decode of {batch}, ms"] = 1e3 * decode_seconds(timed, batch, repeats)
    if "offline" in parts:
        seconds = _median(partial(timed, OFFLINE_REQUESTS, INPUT_LEN, OUTPUT_LEN), repeats)
        name = f"offline {OFFLINE_REQUESTS} x ({INPUT_LEN} in, {OUTPUT_LEN} out), tok/s"
        found[name] = OFFLINE_REQUESTS * OUTPUT_LEN / seconds
    return found


def decode_seconds(timed: Timed, batch: int, repeats: int) -> float:
    """Of a step in which `batch` sequences decode, at DECODE_CONTEXT tokens in the middle.

    Two loads that differ in `_STEPS` tokens a sequence alone: prompts, the steps that they share
    with decodes, and the steps of the sequences that end last are the same in both.
    """
    prompt = DECODE_CONTEXT - _BEGIN - _STEPS // 2
    timed(batch, prompt, _BEGIN + _STEPS)
    steps = [
        timed(batch, prompt, _BEGIN + _STEPS) - timed(batch, prompt, _BEGIN) for _ in range(repeats)
    ]
    return statistics.median(steps) / _STEPS


def _median(run: Callable[[], float], repeats: int) -> float:
    run()
    return statistics.median(run() for _ in range(repeats))
