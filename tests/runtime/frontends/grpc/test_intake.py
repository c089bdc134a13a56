"""Requests that would become far more than their bytes, or never come whole."""

import asyncio
import gc
import time
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.http2 import RawClient, begin_message, open_stream, request_headers
from tests.support.servers import CONFIG, echo_process, echo_server
from trtc.protos.errors import InvalidRequestError
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.client import AsyncClient
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.wire.bounded import MAX_FIELDS, parse
from trtc.runtime.wire.channel import CLIENT_OPTIONS

MANY = 2_000_000


def number(value: int) -> bytes:
    """A varint."""
    digits = b""
    while value > 0x7F:
        digits += bytes([value & 0x7F | 0x80])
        value >>= 7
    return digits + bytes([value])


def field(at: int, content: bytes) -> bytes:
    return number(at << 3 | 2) + number(len(content)) + content


HOSTILE = {
    "empty chat messages": field(5, b"\x0a\x00" * MANY),
    "empty stop strings": b"\x42\x00" * MANY,
    "empty parts of a message": field(5, field(1, b"\x1a\x00" * MANY)),
    "empty biases": field(6, b"\x42\x00" * MANY),
    "prompt ids": field(4, field(1, b"\x01" * 2 * MANY)),
    "ids in fields of their own": field(4, b"\x08\x01" * MANY),
    "stop ids": field(9, b"\x01" * 2 * MANY),
    "unknown fields": b"\xfa\x07\x00" * (MANY // 2),
}


def open_call(channel: Any) -> Any:
    """A Generate that sends nothing by itself."""
    return channel.stream_stream("/trtc.v1.Inference/Generate")()


async def ask(channel: Any, data: bytes, timeout: float = 60.0) -> tuple[str, str]:
    """Status and details of a Generate whose request is `data`."""
    call = channel.unary_stream("/trtc.v1.Inference/Generate")(data, timeout=timeout)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


@asynchronous
async def test_elements_are_counted_before_they_are_objects() -> None:
    """Two megabytes of empty messages used to become 240 MB of objects, before any limit."""
    with echo_process() as server:
        process = psutil.Process(server.process.pid)
        async with grpc.aio.insecure_channel(server.address, options=CLIENT_OPTIONS) as channel:
            assert (await ask(channel, b"")) == (
                "INVALID_ARGUMENT",
                "prompt: is missing. Give text, token_ids or chat",
            )
            before = process.memory_info().rss
            for what, data in HOSTILE.items():
                assert len(data) < ServiceLimits.max_request_bytes
                code, details = await ask(channel, data)
                assert code == "INVALID_ARGUMENT", (what, code, details)
            ends = await asyncio.gather(*(ask(channel, data) for data in HOSTILE.values()))
            assert {code for code, _ in ends} == {"INVALID_ARGUMENT"}
            assert process.memory_info().rss - before < 300 << 20


@asynchronous
async def test_a_request_over_the_size_limit_is_refused() -> None:
    config = replace(CONFIG, limits=ServiceLimits(max_request_bytes=10_000))
    async with (
        echo_server(config=config) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        code, details = await ask(channel, field(3, b"x" * 10_001))
        assert code == "RESOURCE_EXHAUSTED"
        assert "larger than max" in details


@asynchronous
async def test_requests_that_never_come_whole_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = ServiceLimits(max_request_bytes=1 << 20, max_bytes_in_flight=4 << 20)
    async with echo_server(config=replace(CONFIG, limits=limits)) as server:
        client = RawClient(server.address)
        headers = request_headers("/trtc.v1.Inference/Generate")
        for stream in range(1, 100, 2):
            client.send(open_stream(stream, headers) + begin_message(stream, 1 << 20, b"\x1a"))
        async with AsyncClient(server.address) as other:
            result = await other.generate([1], max_tokens=3).result()
            assert len(result.token_ids) == 3
        client.close()


@asynchronous
async def test_a_request_that_does_not_come_whole_in_time_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trtc.runtime.service.intake.READ_S", 0.3)
    async with (
        echo_server() as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = open_call(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert "did not come whole within 0.3 s" in (caught.value.details() or "")
        await eventually(lambda: server.server.service.num_open == 0, "nothing is left")


@asynchronous
async def test_a_call_without_a_request_is_refused() -> None:
    async with (
        echo_server() as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = open_call(channel)
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match="has no request"):
            await call.read()


def test_what_is_parsed_is_what_was_sent() -> None:
    messages = [pb.ChatMessage(role="user", content="x" * 50)] * 1024
    request = pb.GenerateRequest(
        chat=pb.ChatMessages(messages=messages),
        sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0)),
        stop=["a", "b"],
        stop_token_ids=[1, 2, 3],
        max_tokens=5,
    )
    assert parse(pb.GenerateRequest, request.SerializeToString()) == request
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(100_000)))
    assert parse(pb.GenerateRequest, ids.SerializeToString()) == ids


def test_token_ids_are_counted_before_there_is_a_list_of_them() -> None:
    """Twenty-four messages of four million ids became two gigabytes."""
    ids = b"\x81\x01" * 3000
    for data in (
        field(4, field(1, ids)),
        field(9, ids),
        field(9, ids[:4000]) + field(9, ids[4000:]),
    ):
        assert parse(pb.GenerateRequest, data, max_numbers=3000)
        with pytest.raises(InvalidRequestError, match="more than 2999 numbers"):
            parse(pb.GenerateRequest, data, max_numbers=2999)
    assert parse(pb.GenerateRequest, field(3, b"x" * 9000), max_numbers=0).text


@asynchronous
async def test_refused_requests_are_freed_without_the_garbage_collector() -> None:
    """gRPC keeps an aborted call in a reference cycle; the request must be no part of it."""
    kinds = (pb.GenerateRequest, pb.TokenizeRequest, pb.DetokenizeRequest, RequestInput)
    refused = {
        "Generate": field(4, field(1, b"\x01" * 50_000)),
        "Tokenize": field(2, b"x" * 50_000),
        "Detokenize": field(2, b"\x01" * 50_000),
    }

    def requests() -> list[object]:
        return [one for one in gc.get_objects() if type(one) in kinds]

    async with (
        echo_server() as server,
        grpc.aio.insecure_channel(server.address) as opened,
    ):
        channel: Any = opened
        gc.collect()
        gc.disable()
        before = requests()  # other tests' modules have some
        try:
            for method, data in refused.items():
                call = channel.stream_stream(f"/trtc.v1.Inference/{method}")()
                await call.write(data)
                await call.done_writing()
                assert await call.code() is not grpc.StatusCode.OK, method
            await eventually(lambda: len(requests()) <= len(before), "they are freed")
        finally:
            gc.enable()


def test_counting_ends_at_the_limit() -> None:
    begin = time.perf_counter()
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_FIELDS} fields"):
        parse(pb.GenerateRequest, b"\x42\x00" * (16 << 20))
    assert time.perf_counter() - begin < 5.0


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(b"\x1a\x7f", id="a length beyond the end"),
        pytest.param(b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="an endless number"),
        pytest.param(b"\x0b", id="a group"),
        pytest.param(b"\x0d\x00", id="half a number"),
        pytest.param(b"\x08", id="no number"),
        pytest.param(b"\x0a\x01\xff", id="not UTF-8"),
    ],
)
@pytest.mark.parametrize("size", [0, 10_000], ids=["short", "long"])
def test_what_is_no_message_is_refused(tail: bytes, size: int) -> None:
    with pytest.raises(InvalidRequestError, match="not a valid message"):
        parse(pb.GenerateRequest, field(3, b"x" * size) + tail)
