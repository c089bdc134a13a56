"""A CUDA engine as a server runs it: cold start, the rate through gRPC, memory as it was told.

Engines without weights get a file of random ones first, so that a cold start reads what a real one
reads. Clients are processes of their own, as a server's are.
"""

import argparse
import asyncio
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.bench.gpu_weights import with_weights
from examples.bench.peers.gpu_work import INPUT_LEN, OUTPUT_LEN
from examples.bench.served import trtc_server
from trtc.runtime.bench.load import ServerTarget, Shape, local_target, run_load
from trtc.runtime.bench.measure import Load, Measurement
from trtc.runtime.client import AsyncClient
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.device.driver_api import DriverApi
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.engine.opening import open_handle
from trtc.runtime.engine.session import open_session
from trtc.runtime.executors.cuda.executor import CudaExecutor

CLIENTS = 4
START_REPEATS = 3
_START_TIMEOUT_S = 120


def cold_start(engine: Path) -> dict[str, Any]:
    """Seconds from the start of `trtc generate` to its first token, files in the page cache."""
    prompt = ",".join(str(token) for token in range(1, 17))
    command = [sys.executable, "-m", "trtc", "generate", str(engine), "--prompt-ids", prompt]
    seconds = []
    for _ in range(START_REPEATS):
        began = time.monotonic()
        with subprocess.Popen(
            [*command, "--max-tokens", "64", "--ignore-eos", "--temperature", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
            first = os.read(process.stdout.fileno(), 1) if ready else b""
            seconds.append(time.monotonic() - began)
            process.kill()
        if not first:
            raise RuntimeError("trtc generate printed nothing")
    print(f"  cold start: {statistics.median(seconds):.2f} s {[f'{s:.2f}' for s in seconds]}")
    return {"seconds": seconds}


def memory(engine: Path) -> dict[str, Any]:
    """What the GPU has given once the engine is open, beside what its ledger says."""
    gpu = CudaDriverDevice(DriverApi("cuda"))  # with its context, which is not the engine's
    before = gpu.free_bytes()
    session = open_session(engine)
    try:
        executor = session.executor
        assert isinstance(executor, CudaExecutor)
        given = before - gpu.free_bytes()
        ledger = session.manifest.ledger
        told = ledger.weights + ledger.activations + executor.num_pages * ledger.page
    finally:
        session.close()
        gpu.close()
    print(
        f"  memory: the ledger says {told / 1e9:.3f} GB, the GPU gave {given / 1e9:.3f} GB"
        f" ({given / told - 1:+.2%})"
    )
    return {"ledger_bytes": told, "given_bytes": given}


def in_process(
    engine: Path,
    concurrency: int,
    num_requests: int,
    *,
    lengths: tuple[int, int] = (INPUT_LEN, OUTPUT_LEN),
    dummy_weights: bool = False,
) -> Measurement:
    """A load without gRPC; `lengths` are tokens of a prompt and of an output."""
    config = EngineConfig(dummy_weights=dummy_weights)

    async def measure() -> Measurement:
        async with local_target(engine, config, open_handle) as target:
            load = Load(num_requests, concurrency=concurrency)
            # The first pass captures the graphs of every bucket that the load goes through.
            await run_load(target, load, Shape(*lengths, seed=1))
            return await run_load(target, load, Shape(*lengths, seed=2))

    return asyncio.run(measure())


def through_grpc(engine: Path, concurrency: int, num_requests: int) -> float:
    """Output tokens a second of a server in a process of its own, from CLIENTS client processes."""
    with trtc_server(engine, "--log-level", "warning") as served:
        _clients(served.address, concurrency, num_requests, seed=100)
        return _clients(served.address, concurrency, num_requests, seed=200)


def _clients(url: str, concurrency: int, num_requests: int, *, seed: int) -> float:
    command = [sys.executable, "-m", "examples.bench.gpu_serving", "client", url]
    share = [str(concurrency // CLIENTS), str(num_requests // CLIENTS)]
    clients = [
        subprocess.Popen([*command, *share, str(seed + at)], stdout=subprocess.PIPE, text=True)
        for at in range(CLIENTS)
    ]
    replies = [json.loads(client.communicate()[0]) for client in clients]
    took = max(one["end"] for one in replies) - min(one["begin"] for one in replies)
    return float(sum(one["completed"] for one in replies) * OUTPUT_LEN / took)


async def _client(url: str, concurrency: int, num_requests: int, seed: int) -> dict[str, Any]:
    async with AsyncClient(url) as client:
        target = ServerTarget(client, "")
        begin = time.time()
        load = Load(num_requests, concurrency=concurrency)
        found = await run_load(target, load, Shape(INPUT_LEN, OUTPUT_LEN, seed))
        assert not found.failures, found.failures
        return {"begin": begin, "end": time.time(), "completed": found.completed}


def run_serving(engine: Path, *, concurrency: int = 256, num_requests: int = 512) -> dict[str, Any]:
    """All of it for an engine that was built without weights."""
    filled = with_weights(engine, engine.with_name(f"{engine.name}-filled"))
    try:
        result = {"name": engine.name, "cold_start": cold_start(filled), "memory": memory(filled)}
        found = in_process(filled, concurrency, num_requests)
        assert not found.failures, found.failures
        local = found.output_tokens_per_s
        served = through_grpc(filled, concurrency, num_requests)
    finally:
        shutil.rmtree(filled)
    print(
        f"  {concurrency} streams: {local:,.0f} output tok/s in process, {served:,.0f} through"
        f" gRPC ({served / local:.0%})",
        flush=True,
    )
    return {**result, "in_process_tok_s": local, "grpc_tok_s": served}


def main(arguments: Sequence[str] | None = None) -> None:
    """One client process of `through_grpc`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("client",))
    parser.add_argument("url")
    parser.add_argument("concurrency", type=int)
    parser.add_argument("num_requests", type=int)
    parser.add_argument("seed", type=int)
    given = parser.parse_args(arguments)
    reply = _client(given.url, given.concurrency, given.num_requests, given.seed)
    print(json.dumps(asyncio.run(reply)))


if __name__ == "__main__":
    main()
