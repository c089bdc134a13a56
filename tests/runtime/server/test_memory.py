"""Memory of a server stays level: what clients leave behind is freed.

Sizes are those of a server process, over rounds after a warm-up, in which allocators take what they
keep. Requests that were kept after their ends held 83 KiB each, which would be 100 MB here.
"""

import asyncio
from collections.abc import Awaitable, Callable

from tests.support.aio import asynchronous
from tests.support.http2 import RawClient, message, open_stream, request_headers
from tests.support.processes import resident_bytes
from tests.support.servers import ServerProcess, echo_process
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.client import AsyncClient

WARM_UP, ROUNDS = 3, 4
PER_ROUND = 300
TOLERANCE = 6 << 20
"""1,200 streams that are kept are 8.9 MB."""


async def growth(server: ServerProcess, give_up: Callable[[str], Awaitable[None]]) -> int:
    """Bytes by which the server grows while clients give up PER_ROUND calls a round."""
    sizes = []
    async with AsyncClient(server.address) as client:
        for _ in range(WARM_UP + ROUNDS):
            await give_up(server.address)
            await client.generate([1], max_tokens=1).result()
            sizes.append(resident_bytes(server.process.pid))
    return sizes[-1] - sizes[WARM_UP - 1]


async def cancel(address: str) -> None:
    """Requests with prompts and with deadlines that are far away, running and waiting."""
    async with AsyncClient(address, timeout=3600) as client:
        for _ in range(PER_ROUND // 150):
            generations = [
                client.generate([1 + number] * 100, max_tokens=100) for number in range(150)
            ]
            await client.info()  # in the same line: they have been read
            for generation in generations:
                generation.cancel()


async def stall(address: str) -> None:
    await asyncio.to_thread(_stall, address)


def _stall(address: str) -> None:
    """Let the server write nothing of its answers, and go once they have begun."""
    headers = request_headers("/trtc.v1.Inference/Generate")
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), max_tokens=8, logprobs=20)
    data = request.SerializeToString()
    client = RawClient(address, window=0)
    streams = range(1, 2 * PER_ROUND, 2)
    client.send(b"".join(open_stream(one, headers) + message(one, data) for one in streams))
    for _ in range(100):
        client.read_for(0.2)
        if client.num_headers == PER_ROUND:
            break
    assert client.num_headers == PER_ROUND
    client.close()


@asynchronous
async def test_cancelled_requests_leave_nothing_behind() -> None:
    # Steps are so slow that a request has few tokens when it is cancelled.
    with echo_process("--step-s", "0.02") as server:
        assert await growth(server, cancel) < TOLERANCE


@asynchronous
async def test_streams_that_nobody_reads_leave_nothing_behind() -> None:
    with echo_process() as server:
        assert await growth(server, stall) < TOLERANCE
