"""Thousands of requests whose clients leave, over every protocol: nothing of them stays.

    python -m examples.bench.aborts ENGINE --requests 20000

A client leaves while it sends its request, before the answer, in its head, in an event, or at its
end; it closes its connection or resets it. The engine needs a tokenizer. The server gets a small KV
pool, which is used up before the first reading: prefixes that it keeps are no leak. Exit status 1:
pages, sequences, file descriptors or memory are more than before, when the server had already seen
a tenth as many; or a request that stays to its end is not answered as it was before.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from examples.bench.peers.processes import current_rss
from examples.bench.served import TrtcServer, trtc_server
from examples.bench.soak import metrics
from trtc.protos.kserve import grpc_service_pb2 as kserve
from trtc.protos.smg import trtllm_service_pb2 as smg
from trtc.runtime.client import AsyncClient

AT_ONCE = 32
WARM_UP_SHARE = 0.1
GROWTH_BYTES = 32 << 20
"""What allocators may keep besides. Of 20,000 requests that each left 2 KB it would be 40 MB."""
WORKER_FILES = 2
"""A socket each of the processes that render chat templates: how many there are depends on how many
chats come at once."""
PATIENCE_S = 30.0
_MAX_TOKENS = 200
_MOST_READ = 4000
_CHAT = {"messages": [{"role": "user", "content": "def f("}], "max_tokens": _MAX_TOKENS}
_GENERATED: dict[str, Any] = {"inputs": "def f(", "parameters": {"max_new_tokens": _MAX_TOKENS}}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**_CHAT, "stream": True},
    "/v1/completions": {"prompt": "def f(", "max_tokens": _MAX_TOKENS, "stream": True, "n": 2},
    "/v1/responses": {"input": "def f(", "max_output_tokens": _MAX_TOKENS, "stream": True},
    "/v1/messages": {**_CHAT, "stream": True},
    "/api/chat": {"messages": _CHAT["messages"], "options": {"num_predict": _MAX_TOKENS}},
    "/generate_stream": _GENERATED,
    "/generate": _GENERATED,  # whole
    "/v2/models/MODEL/generate_stream": {
        "text_input": "def f(",
        "max_tokens": _MAX_TOKENS,
        "stream": True,
    },
    "/v1/embeddings": {"input": "a"},  # nobody's
}
_STEM = [5, 17, 9]
KV_BYTES = 32 << 20


@dataclass(frozen=True)
class Reading:
    """What a server holds while nobody asks anything."""

    rss: int
    num_fds: int
    num_pages: int
    """Of the KV pool, by running requests."""
    num_sequences: int
    """Running and waiting."""


def read(served: TrtcServer) -> Reading:
    pid = served.server.process.pid
    num_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))  # before the scrape opens another
    scraped = metrics(served)
    return Reading(
        current_rss(pid),
        num_fds,
        int(scraped["trtc_kv_pages_used"]),
        int(scraped["trtc_num_requests_running"] + scraped["trtc_num_requests_waiting"]),
    )


async def leave_http(served: TrtcServer, path: str, rng: random.Random) -> None:
    """Ask, and leave somewhere."""
    body = json.dumps(STREAMS[path]).encode()
    head = f"POST {path.replace('MODEL', served.model)} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    reader, writer = await asyncio.open_connection("127.0.0.1", served.http_port)
    try:
        if rng.random() < 0.2:
            request = request[: rng.randrange(len(request))]
        writer.write(request)
        await writer.drain()
        if rng.random() < 0.7 and request.endswith(body):
            await reader.read(rng.randrange(1, 200))
            if rng.random() < 0.5:
                await reader.read(rng.randrange(1, _MOST_READ))
    except ConnectionError:
        return
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


async def leave_trtc(client: AsyncClient, rng: random.Random) -> None:
    generation = client.generate("def f(", max_tokens=_MAX_TOKENS)
    for _ in range(rng.randrange(4)):
        await anext(generation)
    generation.cancel()


async def leave_smg(channel: grpc.aio.Channel, rng: random.Random) -> None:
    generate = channel.unary_stream(
        "/trtllm.TrtllmService/Generate",
        request_serializer=smg.GenerateRequest.SerializeToString,
        response_deserializer=smg.GenerateResponse.FromString,
    )
    stem = smg.TokenizedInput(input_token_ids=_STEM)
    call = generate(smg.GenerateRequest(tokenized=stem, max_tokens=_MAX_TOKENS, streaming=True))
    for _ in range(rng.randrange(4)):
        await call.read()
    call.cancel()


async def leave_kserve(channel: grpc.aio.Channel, model: str, rng: random.Random) -> None:
    stream = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=kserve.ModelInferRequest.SerializeToString,
        response_deserializer=kserve.ModelStreamInferResponse.FromString,
    )
    request = kserve.ModelInferRequest(model_name=model)
    for name, datatype, value in (
        ("input_ids", "INT32", np.array([_STEM], np.int32)),
        ("max_tokens", "INT32", np.array([[_MAX_TOKENS]], np.int32)),
        ("stream", "BOOL", np.array([[True]])),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=value.shape)
        request.raw_input_contents.append(value.tobytes())
    call = stream(iter([request]))
    for _ in range(rng.randrange(4)):
        await call.read()
    call.cancel()


Leave = Callable[[random.Random], Awaitable[None]]


def ways(served: TrtcServer, client: AsyncClient, channel: grpc.aio.Channel) -> Sequence[Leave]:
    """A function for each protocol that asks and leaves."""
    return (
        *(partial(leave_http, served, path) for path in STREAMS),
        partial(leave_trtc, client),
        partial(leave_smg, channel),
        partial(leave_kserve, channel, served.model),
    )


async def leave_all(leaves: Sequence[Leave], count: int, seed: int) -> None:
    """So many requests that are left, AT_ONCE at a time."""
    rng = random.Random(seed)
    left = iter(range(count))

    async def work() -> None:
        for number in left:
            await leaves[number % len(leaves)](rng)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def answer(client: AsyncClient) -> str:
    """Of a request that stays."""
    result = await client.generate("def f(", max_tokens=16, temperature=0.0).result()
    return result.text


async def settled(served: TrtcServer, before: Reading | None) -> Reading:
    """A reading when all has ended that ends; the last within PATIENCE_S otherwise.

    Args:
        before: with as many open files, and those of workers; None: with as many as the reading
            before it.
    """
    num_fds = -1 if before is None else before.num_fds + WORKER_FILES
    for _ in range(int(PATIENCE_S / 0.1)):
        reading = await asyncio.to_thread(read, served)
        is_idle = reading.num_pages == reading.num_sequences == 0
        if is_idle and reading.num_fds <= num_fds:
            break
        if before is None:
            num_fds = reading.num_fds
        await asyncio.sleep(0.1)
    return reading


def problems(before: Reading, after: Reading, growth_bytes: int = GROWTH_BYTES) -> list[str]:
    """What stayed of the requests between two readings."""
    found = []
    if after.num_pages or after.num_sequences:
        found.append(f"{after.num_pages} KV pages and {after.num_sequences} sequences are held")
    if after.num_fds > before.num_fds + WORKER_FILES:
        found.append(f"{after.num_fds - before.num_fds} more file descriptors are open")
    if after.rss > before.rss + growth_bytes:
        found.append(f"memory grew from {before.rss:,} to {after.rss:,} bytes")
    return found


async def run(served: TrtcServer, count: int, seed: int) -> tuple[Reading, Reading, list[str]]:
    # Two connections over gRPC for all: its library closes one a while after its client.
    async with (
        AsyncClient(served.address) as client,
        grpc.aio.insecure_channel(served.address) as channel,
    ):
        leaves = ways(served, client, channel)
        expected = await answer(client)
        await leave_all(leaves, int(count * WARM_UP_SHARE), seed)
        before = await settled(served, None)
        await leave_all(leaves, count, seed + 1)
        after = await settled(served, before)
        wrong = problems(before, after)
        if await answer(client) != expected:
            wrong.append("a request is answered in another way than before")
    return before, after, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-bytes", type=int, default=KV_BYTES, help="of the KV pool")
    parser.add_argument("--threads", type=int, help="of a CPU engine")
    given = parser.parse_args(arguments)
    options = ["--kv-bytes", str(given.kv_bytes)]
    if given.threads is not None:
        options += ["--threads", str(given.threads)]
    with trtc_server(given.engine, *options) as served:
        before, after, wrong = asyncio.run(run(served, given.requests, given.seed))
    print(f"before: {before}\nafter {given.requests:,} requests: {after}")
    for problem in wrong:
        print(f"WRONG: {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
