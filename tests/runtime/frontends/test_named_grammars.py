"""A grammar of the engine, named by clients that have room for a schema only."""

import json
import re
import warnings
from collections.abc import Awaitable, Callable

import grpc.aio
import httpx
import pytest

from tests.support.aio import asynchronous
from tests.support.ollama_client import ollama_client
from tests.support.servers import TOKENIZER, EchoEngine, RunningServer, echo_server
from tests.support.tgi_client import tgi_client
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.requests.grammar import Grammar, schema_or_name
from trtc.runtime.text.tokenizer import Tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # stubs made by an older protobuf than ours
    smg = pytest.importorskip("smg_grpc_proto", reason="make setup installs it")
    pb, pb_grpc = smg.trtllm_service_pb2, smg.trtllm_service_pb2_grpc

ECHO = EchoEngine(
    EchoOptions(vocab_size=4096, num_pages=512),
    tokenizer=TOKENIZER,
    grammars={"word": Grammar("regex", "(ab|cd){3}")},
)


async def ollama(server: RunningServer, name: str) -> str:
    async with ollama_client(server) as client:
        answer = await client.generate("echo", "def", format={"named": name}, raw=True)
    return str(answer.response)


async def tgi(server: RunningServer, name: str) -> str:
    async with tgi_client(server) as client:
        return await client.text_generation(
            "def", max_new_tokens=40, grammar={"type": "json", "value": {"named": name}}
        )


async def smg_grpc(server: RunningServer, name: str) -> str:
    guide = pb.GuidedDecodingParams(
        guide_type=pb.GuidedDecodingParams.GUIDE_TYPE_JSON_SCHEMA, guide=json.dumps({"named": name})
    )
    message = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_token_ids=(5, 17, 9)),
        max_tokens=40,
        sampling_config=pb.SamplingConfig(temperature=0.0),
        guided_decoding=guide,
    )
    async with grpc.aio.insecure_channel(server.address) as channel:
        (response,) = [one async for one in pb_grpc.TrtllmServiceStub(channel).Generate(message)]
    tokenizer = Tokenizer.load(TOKENIZER)
    return tokenizer.decode(list(response.complete.output_token_ids))


@pytest.mark.parametrize("ask", [ollama, tgi, smg_grpc])
@asynchronous
async def test_a_schema_that_is_a_name_is_the_grammar(
    ask: Callable[[RunningServer, str], Awaitable[str]],
) -> None:
    async with echo_server(ECHO) as server:
        assert re.fullmatch("(ab|cd){3}", await ask(server, "word"))
        with pytest.raises(Exception, match="Give one of word"):  # each client has its own
            await ask(server, "other")
        await server.idle()


@asynchronous
async def test_the_name_is_told_by_the_protocols_own_field() -> None:
    async with echo_server(ECHO) as server, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{server.http_port}/api/generate"
        body = {"model": "echo", "prompt": "a", "raw": True, "format": {"named": "other"}}
        answer = await client.post(url, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("format: ")


@pytest.mark.parametrize("text", ['{"named": 1}', '{"named": "a", "type": "string"}', "{", "[]"])
def test_any_other_schema_is_one(text: str) -> None:
    assert schema_or_name(text).kind == "json_schema"
