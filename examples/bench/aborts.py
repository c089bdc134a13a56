"""Thousands of requests whose clients leave, over every protocol: nothing of them stays.

    python -m examples.bench.aborts ENGINE --requests 20000

A client leaves while it sends its request, before the answer, in its head, in an event, or at its
end; it closes its connection or resets it. The engine needs a tokenizer. Exit status 1: pages,
sequences, file descriptors or memory are more than before, when the server had already seen a tenth
as many; or a request that stays to its end is not answered as it was before.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.bench.peers.processes import current_rss
from examples.bench.served import TrtcServer, trtc_server
from examples.bench.soak import metrics
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
    "/v1/embeddings": {"input": "a"},  # nobody's
}
GRPC = "trtc.v1"


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


async def leave_http(port: int, path: str, rng: random.Random) -> None:
    """Ask, and leave somewhere."""
    body = json.dumps(STREAMS[path]).encode()
    request = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
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


async def leave_grpc(client: AsyncClient, rng: random.Random) -> None:
    generation = client.generate("def f(", max_tokens=_MAX_TOKENS)
    for _ in range(rng.randrange(4)):
        await anext(generation)
    generation.cancel()


async def leave_all(served: TrtcServer, client: AsyncClient, count: int, seed: int) -> None:
    """So many requests that are left, AT_ONCE at a time."""
    rng = random.Random(seed)
    ways = [*STREAMS, GRPC]
    left = iter(range(count))

    async def work() -> None:
        for number in left:
            way = ways[number % len(ways)]
            if way == GRPC:
                await leave_grpc(client, rng)
            else:
                await leave_http(served.http_port, way, rng)

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
    # One connection over gRPC for all: its library closes one a while after its client.
    async with AsyncClient(served.address) as client:
        expected = await answer(client)
        await leave_all(served, client, int(count * WARM_UP_SHARE), seed)
        before = await settled(served, None)
        await leave_all(served, client, count, seed + 1)
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
    parser.add_argument("--threads", type=int, help="of a CPU engine")
    given = parser.parse_args(arguments)
    options = [] if given.threads is None else ["--threads", str(given.threads)]
    with trtc_server(given.engine, *options) as served:
        before, after, wrong = asyncio.run(run(served, given.requests, given.seed))
    print(f"before: {before}\nafter {given.requests:,} requests: {after}")
    for problem in wrong:
        print(f"WRONG: {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
