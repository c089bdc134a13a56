"""CUDA engines of several ranks: the shape of Llama-3.1-70B, and what happens when a rank dies."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from examples.bench.batches import decode_batch
from examples.bench.gpu_steps import opened, time_engine
from examples.bench.peers.gpu_work import DECODE_CONTEXT, Workload
from trtc.protos.errors import EnvironmentFault
from trtc.runtime.executors.ranks.executor import ShardedExecutor
from trtc.runtime.sampling.sampler import SamplingBatch

WORKLOAD = Workload(
    decodes=tuple((batch, DECODE_CONTEXT) for batch in (1, 16, 64, 128)),
    prefills=((16, 1024), (8, 4096)),
)
NUM_PAGES = 10_000
"""160,000 tokens of 16 a page: 128 sequences of 1024 tokens and 32 prompts of 4096."""


def run_ranks(engine: Path, copy_rate: float) -> dict[str, Any]:
    """Decode steps and prefills. A decode's floor is what one rank reads: its share of the weights
    and of the keys and values, and nothing for what the ranks exchange."""
    with opened(engine, ShardedExecutor, dummy_weights=True, num_pages=NUM_PAGES) as (session, _):
        return time_engine(engine.name, session, WORKLOAD, copy_rate)


def kill_a_rank(engine: Path) -> dict[str, Any]:
    """Seconds from kill -9 of the last rank, under decode steps, to the error; and the error."""
    with opened(engine, ShardedExecutor, num_pages=256) as (_, executor):
        batch = decode_batch(executor, 4, 64)
        sampling = SamplingBatch.greedy(4)
        executor.launch(batch, sampling).wait()
        step = executor.launch(batch, sampling)
        began = time.monotonic()
        os.kill(executor.pids[-1], signal.SIGKILL)
        try:
            while True:
                step, last = executor.launch(batch, sampling), step
                last.wait()
        except EnvironmentFault as error:
            told = str(error)
        seconds = time.monotonic() - began
    print(f"  {engine.name}: a rank killed, the error after {seconds:.2f} s: {told}", flush=True)
    return {"name": engine.name, "seconds": seconds, "error": told}
