"""CUDA engines of several ranks: the shape of Llama-3.1-70B, and what happens when a rank dies."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.bench.gpu_steps import decode_batch, time_decode, time_prefill
from trtc.protos.errors import EnvironmentFault
from trtc.runtime.executors.ranks.executor import ShardedExecutor
from trtc.runtime.sampler import SamplingBatch
from trtc.runtime.session import Session, open_session

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
BATCHES = (1, 16, 64, 128)
CONTEXT = 1024
NUM_PAGES = 10_000
"""160,000 tokens of 16 a page: 128 sequences of CONTEXT and 32 prompts of 4096."""
PREFILLS = ((16, 1024), (8, 4096))


@contextmanager
def opened_ranks(engine: Path, **options: Any) -> Iterator[tuple[Session, ShardedExecutor]]:
    began = time.perf_counter()
    session = open_session(engine, **options)
    assert isinstance(session.executor, ShardedExecutor)
    print(f"{engine.name}: opened in {time.perf_counter() - began:.2f} s", flush=True)
    try:
        yield session, session.executor
    finally:
        session.close()


def run_ranks(engine: Path, copy_bytes_per_s: float) -> dict[str, Any]:
    """Decode steps and prefills. A decode's floor is what one rank reads: its share of the weights
    and of the keys and values, and nothing for what the ranks exchange."""
    result: dict[str, Any] = {"name": engine.name, "decode_ms": {}, "prefill_tok_s": {}}
    with opened_ranks(engine, dummy_weights=True, num_pages=NUM_PAGES) as (session, executor):
        weights = session.manifest.ledger.weights
        token_bytes = executor.kv.page_bytes // executor.kv.page_size
        for batch in BATCHES:
            timing = time_decode(executor, batch, CONTEXT)
            floor = (weights + batch * CONTEXT * token_bytes) / copy_bytes_per_s * 1e3
            result["decode_ms"][batch] = {**vars(timing), "floor": floor}
            print(
                f"  {engine.name} decode {batch:3}: {timing.milliseconds:6.2f} ms"
                f" [{timing.fastest:.2f}-{timing.slowest:.2f}]   floor {floor:.2f}"
                f" ({floor / timing.milliseconds:.0%})",
                flush=True,
            )
        for sequences, length in PREFILLS:
            timing = time_prefill(executor, sequences, length)
            rate = sequences * length / timing.milliseconds * 1e3
            result["prefill_tok_s"][f"{sequences}x{length}"] = rate
            print(f"  {engine.name} prefill {sequences} x {length}: {rate:,.0f} tok/s", flush=True)
        timing = time_prefill(executor, 1, 4096)
        result["ttft_4096_ms"] = vars(timing)
        print(f"  {engine.name} TTFT of 4096 tokens: {timing.milliseconds:.1f} ms", flush=True)
    return result


def kill_a_rank(engine: Path) -> dict[str, Any]:
    """Seconds from kill -9 of the last rank, under decode steps, to the error; and the error."""
    with opened_ranks(engine, num_pages=256) as (_, executor):
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
