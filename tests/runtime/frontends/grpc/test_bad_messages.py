"""What is wrong with a message whatever its service: every method of the gRPC port refuses it, and
nothing is left behind. Fields are judged in the tests of each service."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.servers import EOS, TOKENIZER, EchoEngine, RunningServer, echo_server
from trtc.protos.kserve import grpc_service_pb2 as kserve
from trtc.protos.smg import trtllm_service_pb2 as smg
from trtc.protos.trtc.v1 import inference_pb2 as own
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.grpc.kserve import methods as kserve_methods
from trtc.runtime.frontends.grpc.smg import methods as smg_methods
from trtc.runtime.wire import methods as own_methods
from trtc.runtime.wire.methods import Method

ENGINE = EchoEngine(EchoOptions(vocab_size=4096, never=(EOS,)), tokenizer=TOKENIZER)
SLOW = EchoEngine(EchoOptions(vocab_size=4096, never=(EOS,), step_s=0.03), tokenizer=TOKENIZER)
Contents = kserve.InferTensorContents
STREAMED = {
    own_methods.GENERATE.path,
    smg_methods.GENERATE.path,
    smg_methods.SUBSCRIBE_KV_EVENTS.path,
}
IN_BAND = kserve_methods.MODEL_STREAM_INFER.path
"""Its errors are messages of its stream."""
GARBAGE = (b"\xff\xff\xff", b"\x0a\x7f", b"garbage that is no protobuf", b"\x0a\x02\xff\xfe")
"""Bytes that no message begins with, one that ends too soon, and a first text that is not UTF-8."""


def methods_of(module: ModuleType) -> Iterator[Method[Any, Any]]:
    yield from (one for one in vars(module).values() if isinstance(one, Method))


METHODS = {
    one.path: one
    for module in (own_methods, kserve_methods, smg_methods)
    for one in methods_of(module)
    if one.path not in (IN_BAND, smg_methods.SUBSCRIBE_KV_EVENTS.path)
}


async def ended(channel: grpc.aio.Channel, path: str, data: bytes) -> tuple[Any, str]:
    """The status that a call ends with."""
    try:
        if path in STREAMED:
            async for _ in channel.unary_stream(path, bytes, bytes)(data):
                pass
        else:
            await channel.unary_unary(path, bytes, bytes)(data)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def still_serves(server: RunningServer, channel: grpc.aio.Channel) -> None:
    await server.idle()
    request = own.GenerateRequest(token_ids=own.TokenIds(ids=[1, 2]), max_tokens=2)
    code, said = await ended(channel, own_methods.GENERATE.path, request.SerializeToString())
    assert code is grpc.StatusCode.OK, said


def takes_texts_first(method: Method[Any, Any]) -> bool:
    """Whether field 1 of its request is a text."""
    field = method.request.DESCRIPTOR.fields_by_number.get(1)
    return field is not None and field.type == field.TYPE_STRING


@pytest.mark.parametrize("path", METHODS)
@asynchronous
async def test_bytes_that_are_no_message_are_the_callers_error(path: str) -> None:
    async with echo_server(ENGINE) as server, grpc.aio.insecure_channel(server.address) as channel:
        for data in GARBAGE:
            if data is GARBAGE[-1] and not takes_texts_first(METHODS[path]):
                continue  # a field that it does not know
            code, said = await ended(channel, path, data)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (data, code, said)
            assert "not a valid message" in said
        await still_serves(server, channel)


@pytest.mark.parametrize("path", METHODS)
@asynchronous
async def test_a_message_over_the_size_limit_is_refused(path: str) -> None:
    async with echo_server(ENGINE) as server, grpc.aio.insecure_channel(server.address) as channel:
        code, said = await ended(channel, path, b"\x0a" + b"\x80" * (17 << 20))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in said
        await still_serves(server, channel)


def tensor(name: str, datatype: str, contents: Any) -> Any:
    return kserve.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=[1, 1], contents=contents
    )


LONG: dict[str, Any] = {
    own_methods.GENERATE.path: own.GenerateRequest(
        token_ids=own.TokenIds(ids=[1, 2]), max_tokens=900, n=2
    ),
    smg_methods.GENERATE.path: smg.GenerateRequest(
        tokenized=smg.TokenizedInput(input_token_ids=[1, 2]),
        max_tokens=900,
        streaming=True,
        sampling_config=smg.SamplingConfig(),
        ignore_eos=True,
    ),
    IN_BAND: kserve.ModelInferRequest(
        model_name="echo",
        inputs=[
            tensor("input_ids", "INT32", Contents(int_contents=[1])),
            tensor("max_tokens", "INT32", Contents(int_contents=[900])),
            tensor("streaming", "BOOL", Contents(bool_contents=[True])),
        ],
    ),
}


async def begun(channel: Any, path: str, data: bytes) -> Any:
    """A call that was sent its request, and whose answers nobody has read."""
    if path != IN_BAND:
        return channel.unary_stream(path, bytes, bytes)(data)
    call = channel.stream_stream(path, bytes, bytes)()
    await call.write(data)
    return call


@pytest.mark.parametrize("path", LONG)
@asynchronous
async def test_a_client_may_leave_at_every_message(path: str) -> None:
    data = LONG[path].SerializeToString()
    async with echo_server(SLOW) as server, grpc.aio.insecure_channel(server.address) as channel:
        for num_messages in range(4):
            call = await begun(channel, path, data)
            for _ in range(num_messages):
                assert isinstance(await call.read(), bytes), await call.details()
            call.cancel()
        await server.idle()
        await eventually(lambda: server.server.service.num_open == 0, "streams end")
        await still_serves(server, channel)
