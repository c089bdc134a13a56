"""CUDA engines of several ranks: which shapes, their steps, and what happens when a rank dies."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.bench.batches import decode_batch
from examples.bench.gpu_steps import opened, pages_for_workload, time_engine
from examples.bench.peers.gpu_work import Workload
from trtc.protos.errors import EnvironmentFault
from trtc.runtime.executors.ranks.executor import ShardedExecutor
from trtc.runtime.sampling.sampler import SamplingBatch


@dataclass(frozen=True)
class Ranks:
    """An engine of a shape, without weights, on several GPUs."""

    shape: str
    """Of gpu_shapes.SHAPES."""
    dtype: str
    tp: int
    ep: bool = False

    @property
    def name(self) -> str:
        """Its directory."""
        return f"{self.shape}-tp{self.tp}" + "-ep" * self.ep


RANKED = (
    Ranks("70b", "fp8", 2),
    Ranks("70b", "fp8", 4),
    Ranks("deepseek-v2-lite", "fp8", 2),
    Ranks("deepseek-v2-lite", "fp8", 2, ep=True),
    Ranks("qwen3.5-35b-a3b", "fp8", 2),
    Ranks("qwen3.5-35b-a3b", "fp8", 2, ep=True),
    Ranks("gpt-oss-20b", "mxfp4", 2, ep=True),
)
RANKED_AS = {"tp2": False, "tp2-ep": True}
"""How names of the twins' engines on two ranks begin, and whether a rank has whole experts."""
RANKED_TWINS = ("fp32", "bf16", "fp8")
"""Variations of the twins that are built for two ranks as well."""


def run_ranks(engine: Path, workload: Workload, copy_rate: float) -> dict[str, Any]:
    """Decode steps and prefills. A decode's floor is what one rank reads: its share of the weights
    and of the keys and values, and nothing for what the ranks exchange."""
    num_pages = pages_for_workload(engine, workload)
    with opened(engine, ShardedExecutor, dummy_weights=True, num_pages=num_pages) as (session, _):
        return time_engine(engine.name, session, workload, copy_rate)


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
