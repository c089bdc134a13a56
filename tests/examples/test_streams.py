"""The load over HTTP that `examples.bench.streams` measures, against a server that echoes."""

from examples.bench.streams import client
from tests.support.aio import asynchronous
from tests.support.servers import EOS, EchoEngine, echo_server
from trtc.runtime.bench.load import Shape
from trtc.runtime.bench.measure import Load
from trtc.runtime.executors.echo import EchoOptions


@asynchronous
async def test_every_token_is_counted_over_http_as_over_grpc() -> None:
    async with echo_server(EchoEngine(EchoOptions(never=(EOS,)))) as server:
        url = f"http://127.0.0.1:{server.http_port}"
        for place in (url, ""):
            found = await client(place, server.address, Load(6, concurrency=3), Shape(5, 7))
            assert (found.completed, found.output_tokens, found.failures) == (6, 42, {})
