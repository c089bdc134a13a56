"""Streams of one server over HTTP beside gRPC beside the engine in process: rates and gaps.

    python -m examples.bench.streams ENGINE --streams 64

Clients read raw bytes: a library that makes objects of every event would be measured itself. They
are processes of their own, and share the machine's cores with the server.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil

from examples.bench.served import TrtcServer, trtc_server
from trtc.runtime.bench.load import ServerTarget, Shape, local_target, run_load
from trtc.runtime.bench.measure import Load, Measurement
from trtc.runtime.client import AsyncClient
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.engine.opening import open_handle
from trtc.runtime.requests.model_info import ModelInfo
from trtc.runtime.requests.request import Output
from trtc.runtime.requests.request_input import RequestInput


class Choice(msgspec.Struct):
    text: str
    token_ids: list[int]


class Chunk(msgspec.Struct):
    choices: list[Choice]


_DECODER = msgspec.json.Decoder(Chunk)


class SseTarget:
    """`/v1/completions` of a server, a connection a request."""

    def __init__(self, url: str, info: ModelInfo) -> None:
        place = urlsplit(url)
        self._host, self._port = place.hostname, place.port
        self._info = info

    async def info(self) -> ModelInfo:
        return self._info

    async def stream(self, request_input: RequestInput) -> AsyncIterator[Output]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(_request(request_input))
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"the server answers {status!r}")
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    (choice,) = _DECODER.decode(line[len(b"data: ") :]).choices
                    yield Output("", 0, tuple(choice.token_ids), choice.text)
                elif line.startswith(b"data: [DONE]"):
                    return
        finally:
            writer.close()

    def stats(self) -> LoopStats | None:
        return None


def _request(request_input: RequestInput) -> bytes:
    body = msgspec.json.encode(
        {
            "prompt": request_input.token_ids,
            "max_tokens": request_input.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def client(url: str, address: str, load: Load, shape: Shape) -> Measurement:
    """One client process's load, over HTTP if there is a URL of it."""
    async with AsyncClient(address) as grpc_client:
        target = ServerTarget(grpc_client, "")
        if not url:
            return await run_load(target, load, shape)
        return await run_load(SseTarget(url, await target.info()), load, shape)


def clients(
    served: TrtcServer, load: Load, shape: Shape, *, http: bool, processes: int
) -> dict[str, float]:
    """Rate and gaps of all clients together, and what the server's process computed meanwhile."""
    url = served.metrics_url.removesuffix("/metrics") if http else ""
    streams, requests = load.concurrency or 1, load.num_requests
    command = [sys.executable, "-m", "examples.bench.streams", served.address, "--http", url]
    command += ["--streams", str(streams // processes), "--requests", str(requests // processes)]
    command += ["--input-len", str(shape.input_len), "--output-len", str(shape.output_len)]
    server = psutil.Process(served.server.process.pid)
    before = sum(server.cpu_times()[:2])
    replies = asyncio.run(_run([[*command, "--seed", str(at)] for at in range(processes)]))
    seconds = sum(server.cpu_times()[:2]) - before
    took = max(one["end"] for one in replies) - min(one["begin"] for one in replies)
    tokens = sum(one["tokens"] for one in replies)
    return {
        "tok_s": tokens / took,
        "itl_p50_ms": max(one["itl_p50_ms"] for one in replies),
        "itl_p99_ms": max(one["itl_p99_ms"] for one in replies),
        "cpu_us_a_token": 1e6 * seconds / tokens,
    }


async def _run(commands: Sequence[Sequence[str]]) -> list[dict[str, float]]:
    running = [
        await asyncio.create_subprocess_exec(*one, stdout=asyncio.subprocess.PIPE)
        for one in commands
    ]
    return [json.loads((await one.communicate())[0]) for one in running]


def in_process(engine: Path, load: Load, shape: Shape) -> dict[str, float]:
    async def measure() -> dict[str, float]:
        async with local_target(engine, EngineConfig(), open_handle) as target:
            await run_load(target, load, shape)
            before = time.process_time()
            found = await run_load(target, load, Shape(shape.input_len, shape.output_len, seed=99))
            seconds = time.process_time() - before
        cost = 1e6 * seconds / found.output_tokens
        return {"tok_s": found.output_tokens_per_s, **_gaps(found), "cpu_us_a_token": cost}

    return asyncio.run(measure())


def _gaps(found: Measurement) -> dict[str, float]:
    return {"itl_p50_ms": found.itl_ms.p50, "itl_p99_ms": found.itl_ms.p99}


def compare(engine: Path, load: Load, shape: Shape, *, processes: int) -> dict[str, Any]:
    """The three ways in, one after the other."""
    found = {"in process": in_process(engine, load, shape)}
    with trtc_server(engine, "--log-level", "warning") as served:
        for http, name in ((False, "gRPC"), (True, "HTTP")):
            clients(served, load, shape, http=http, processes=processes)
            found[name] = clients(served, load, shape, http=http, processes=processes)
    return found


def report(found: dict[str, Any]) -> None:
    best = found["in process"]
    for name, one in found.items():
        line = f"{name:10s} {one['tok_s']:9,.0f} tok/s ({one['tok_s'] / best['tok_s']:.0%})"
        line += f"  ITL p50 {one['itl_p50_ms']:.2f} ms, p99 {one['itl_p99_ms']:.2f} ms"
        line += f" ({one['itl_p99_ms'] / best['itl_p99_ms']:.2f}x)"
        line += f"  {one['cpu_us_a_token']:.0f} us of CPU time a token"
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", help="an engine's directory; of a client, the server's address")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--http", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    load = Load(given.requests, concurrency=given.streams)
    shape = Shape(given.input_len, given.output_len, given.seed)
    if given.http is None:
        report(compare(Path(given.engine), load, shape, processes=given.clients))
        return
    begin = time.time()
    found = asyncio.run(client(given.http, given.engine, load, shape))
    assert not found.failures, found.failures
    reply = {"begin": begin, "end": time.time(), "tokens": found.output_tokens, **_gaps(found)}
    print(json.dumps(reply))


if __name__ == "__main__":
    main()
