"""Every field that can be wrong: one status, one message that names it, nothing left behind."""

from typing import Any

import grpc
import grpc.aio
import pytest

from tests.support.aio import asynchronous
from tests.support.servers import CONFIG, TOKENIZER, EchoEngine, echo_server
from trtc.protos.errors import InvalidRequestError
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.client import AsyncClient
from trtc.runtime.executors.echo import EchoOptions

IDS = pb.TokenIds(ids=[1, 2, 3])
NAN = float("nan")
INFINITY = float("inf")


def sampling(**fields: Any) -> dict[str, Any]:
    return {"token_ids": IDS, "sampling": pb.SamplingParams(**fields)}


# (fields of GenerateRequest, what the message must say)
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt: is missing"),
    ({"token_ids": pb.TokenIds()}, "prompt: has no tokens"),
    ({"token_ids": pb.TokenIds(ids=[1, 4096])}, "token id 4096 is not in the vocabulary"),
    ({"token_ids": pb.TokenIds(ids=[2**32 - 1])}, "token id 4294967295"),
    ({"token_ids": pb.TokenIds(ids=[1] * 1024)}, "prompt: has 1024 tokens"),
    ({"text": ""}, "prompt"),
    ({"text": "x " * 3000}, "Shorten it"),
    ({"text": "x" * 20_000}, "prompt.text: has 20000 bytes"),
    ({"chat": pb.ChatMessages()}, "has no messages"),
    (
        {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")] * 40)},
        "has 40 messages",
    ),
    (
        {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x" * 20_000)])},
        "has 20004 bytes",
    ),
    (
        {"chat": pb.ChatMessages(messages=[pb.ChatMessage(parts=[pb.ContentPart()] * 257)])},
        "chat.messages[0].parts: has 257 items",
    ),
    (
        {"chat": pb.ChatMessages(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * 999)])},
        "chat.messages[0].tool_calls: has 999 items",
    ),
    ({"token_ids": IDS, "max_tokens": 0}, "max_tokens: is 0"),
    ({"token_ids": IDS, "max_tokens": 1022}, "max_tokens: is 1022"),
    ({"token_ids": IDS, "max_tokens": 2**32 - 1}, "max_tokens: is 4294967295"),
    ({"token_ids": IDS, "n": 0}, "n: is 0"),
    ({"token_ids": IDS, "n": 1000}, "n: is 1000"),
    ({**sampling(temperature=0.0), "n": 2}, "n: 2 sequences at temperature 0"),
    ({"token_ids": IDS, "logprobs": 1000}, "logprobs: is 1000"),
    ({"token_ids": IDS, "prompt_logprobs": 21}, "prompt_logprobs: is 21"),
    ({"token_ids": IDS, "max_tokens": 4, "min_tokens": 5}, "min_tokens: is 5"),
    ({"token_ids": IDS, "stop": [""]}, "stop"),
    ({"token_ids": IDS, "stop": ["x"] * 17}, "stop"),
    ({"token_ids": IDS, "stop": ["x" * 10_000]}, "stop"),
    ({"token_ids": IDS, "stop_token_ids": [4096]}, "stop_token_ids: token id 4096"),
    ({"token_ids": IDS, "priority": 2**31 - 1}, "priority: is 2147483647"),
    ({"token_ids": IDS, "request_id": "x" * 257}, "request_id: has 257 characters"),
    (sampling(temperature=NAN), "temperature: is nan"),
    (sampling(temperature=INFINITY), "temperature: is inf"),
    (sampling(temperature=-0.1), "temperature: is -0.1"),
    (sampling(top_k=2**31), "top_k"),
    (sampling(top_p=0.0), "top_p: is 0.0"),
    (sampling(top_p=1.1), "top_p: is 1.1"),
    (sampling(top_p=NAN), "top_p: is nan"),
    (sampling(min_p=1.5), "min_p: is 1.5"),
    (sampling(min_p=NAN), "min_p: is nan"),
    (sampling(repetition_penalty=0.0), "repetition_penalty: is 0.0"),
    (sampling(repetition_penalty=NAN), "repetition_penalty: is nan"),
    (sampling(presence_penalty=2.5), "presence_penalty: is 2.5"),
    (sampling(presence_penalty=NAN), "presence_penalty: is nan"),
    (sampling(frequency_penalty=-3), "frequency_penalty: is -3"),
    (sampling(frequency_penalty=INFINITY), "frequency_penalty: is inf"),
    (sampling(logit_bias={4096: 1.0}), "logit_bias: token id 4096"),
    (sampling(logit_bias={1: NAN}), "logit_bias: is nan"),
    (sampling(logit_bias={1: 1000.0}), "logit_bias: is 1000"),
]

LIMITED = EchoEngine(EchoOptions(vocab_size=4096), tokenizer=TOKENIZER)


def limited() -> Any:
    limits = CONFIG.limits.__class__(max_prompt_bytes=10_000, max_chat_messages=32)
    return echo_server(LIMITED, config=CONFIG.__class__(**{**vars(CONFIG), "limits": limits}))


async def ask(channel: grpc.aio.Channel, method: str, data: bytes) -> tuple[Any, str]:
    """The status that a call ends with."""
    path = f"/trtc.v1.Inference/{method}"
    try:
        if method == "Generate":
            async for _ in channel.unary_stream(path, bytes, bytes)(data):
                pass
        else:
            await channel.unary_unary(path, bytes, bytes)(data)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


@asynchronous
async def test_every_bad_field_is_named_and_nothing_is_left() -> None:
    async with limited() as server, grpc.aio.insecure_channel(server.address) as channel:
        for fields, said in BAD:
            request = pb.GenerateRequest(**fields)
            code, details = await ask(channel, "Generate", request.SerializeToString())
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (fields, code, details)
            assert said in details, (fields, details)
            assert "\n" not in details
            assert len(details) < 1100
        await server.idle()
        good = pb.GenerateRequest(token_ids=IDS, max_tokens=2)
        assert await ask(channel, "Generate", good.SerializeToString()) == (
            grpc.StatusCode.OK,
            "",
        )


# Field 1 of every request (and field 3, text, of GenerateRequest) as bytes that are not UTF-8.
NOT_UTF8 = [
    ("Generate", b"\x1a\x02\xff\xfe"),
    ("Generate", b"\x0a\x01\xff"),
    ("Generate", b"\x42\x01\xc3"),
    ("Tokenize", b"\x12\x01\xff"),
    ("Detokenize", b"\x0a\x01\xff"),
    ("Abort", b"\x12\x01\xff"),
    ("GetModelInfo", b"\x0a\x01\xff"),
    ("Generate", b"\x1a\x7f"),
    ("Generate", b"garbage that is no protobuf"),
]


@asynchronous
async def test_bytes_that_are_no_message_are_the_callers_error() -> None:
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        for method, data in NOT_UTF8:
            code, details = await ask(channel, method, data)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (method, data, code, details)
            assert "not a valid message" in details
            assert "UTF-8" in details


@asynchronous
async def test_the_other_methods_name_their_bad_fields() -> None:
    async with limited() as server, grpc.aio.insecure_channel(server.address) as channel:
        table = [
            ("Tokenize", pb.TokenizeRequest(), "input: is missing"),
            ("Tokenize", pb.TokenizeRequest(text="x" * 20_000), "text: has 20000 bytes"),
            ("Detokenize", pb.DetokenizeRequest(token_ids=[1, 4096]), "token_ids[1]: 4096"),
        ]
        for method, request, said in table:
            code, details = await ask(channel, method, request.SerializeToString())
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (method, code, details)
            assert said in details
        for method, request in (
            ("Abort", pb.AbortRequest(request_id="none")),
            ("GetModelInfo", pb.GetModelInfoRequest(model="none")),
            ("Tokenize", pb.TokenizeRequest(model="none", text="x")),
        ):
            code, _ = await ask(channel, method, request.SerializeToString())
            assert code is grpc.StatusCode.NOT_FOUND, method
        code, _ = await ask(channel, "Brew", b"")
        assert code is grpc.StatusCode.UNIMPLEMENTED


@asynchronous
async def test_the_python_client_raises_the_same_error() -> None:
    async with limited() as server, AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate([1], max_tokens=1, temperature=NAN).result()
        error = caught.value
        assert (error.field, error.problem) == ("temperature", "is nan")
        assert error.remedy.startswith("Give at least 0")
        with pytest.raises(InvalidRequestError, match=r"chat\.messages\[0\]"):
            client.chat([{"role": "user"}])
        with pytest.raises(TypeError, match="heat"):
            client.generate([1], heat=2)  # type: ignore[call-overload]
