"""Every field that can be wrong: TGI's error with the field named, and nothing left behind."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.aio import asynchronous
from tests.support.http1 import exchange, post
from tests.support.http_asking import ask, limited
from tests.support.openai_sdk import ECHO, SLOW
from tests.support.servers import EchoEngine, RunningServer, echo_server

PATHS = ("/", "/generate", "/generate_stream")


def asking(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "a", "parameters": parameters}


# body, how its error begins
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "inputs: is missing"),
    ({"inputs": 5}, "inputs: expected str | null, got int"),
    ({"inputs": ["a"]}, "inputs: expected str | null, got array"),
    ({"inputs": ""}, "inputs: has no tokens"),
    ({"inputs": "x" * 20_000}, "inputs: has 20"),
    ({"inputs": "a", "stream": "yes"}, "stream: expected bool | null, got str"),
    ({"inputs": "a", "parameters": 5}, "parameters: expected object, got int"),
    ({"inputs": "a", "parameters": []}, "parameters: expected object, got array"),
    (asking(best_of=2), "parameters.best_of: is not supported"),
    (asking(decoder_input_details=True), "parameters.decoder_input_details: is not supported"),
    (asking(grammar={"type": "lark", "value": ""}), "parameters.grammar.type: is 'lark'"),
    (asking(grammar={"type": "regex", "value": {}}), "parameters.grammar.value: is no text"),
    (asking(grammar={"type": "json", "value": {"not": {}}}), "parameters.grammar.value: cannot be"),
    (asking(truncate=5), "parameters.truncate: is not supported"),
    (asking(typical_p=0.5), "parameters.typical_p: is not supported"),
    (asking(watermark=True), "parameters.watermark: is not supported"),
    (asking(adapter_id="x"), "parameters.adapter_id: is not supported"),
    (asking(details=5), "parameters.details: expected bool | null, got int"),
    (asking(max_new_tokens=0), "parameters.max_new_tokens: is 0"),
    (asking(max_new_tokens=-1), "parameters.max_new_tokens: is -1"),
    (asking(max_new_tokens="9"), "parameters.max_new_tokens: expected int | null, got str"),
    (asking(max_new_tokens=4096), "parameters.max_new_tokens: "),
    (asking(temperature=-1), "parameters.temperature: is -1"),
    (asking(temperature="hot"), "parameters.temperature: expected float | null, got str"),
    (asking(top_p=0), "parameters.top_p: is 0"),
    (asking(top_k=-2), "parameters.top_k: is -2"),
    (asking(repetition_penalty=0), "parameters.repetition_penalty: is 0"),
    (asking(frequency_penalty=3), "parameters.frequency_penalty: is 3"),
    (asking(seed=2**64), "parameters.seed: is 18446744073709551616"),
    (asking(details=True, top_n_tokens=21), "parameters.top_n_tokens: is 21"),
    (asking(stop="x"), "parameters.stop: expected array | null, got str"),
    (asking(stop=["a"] * 17), "parameters.stop (how many): is 17"),
    (asking(stop=[1]), "parameters.stop[0]: expected str, got int"),
    (asking(stop=[""]), "parameters.stop"),
]


async def still_serves(server: RunningServer) -> None:
    await server.idle()
    answer = await ask(server, "/", asking(max_new_tokens=2, details=True, mystery=1))
    assert answer.status == 200
    assert answer.document[0]["details"]["generated_tokens"] == 2
    assert answer.headers["x-trtc-ignored"] == "parameters.mystery"


@pytest.mark.parametrize("path", PATHS)
@asynchronous
async def test_every_bad_field_is_named_and_nothing_is_left(path: str) -> None:
    async with limited() as server:
        for document, said in BAD:
            answer = await ask(server, path, document)
            what = (path, str(document)[:200], answer.body[:300])
            assert answer.status == 422, what
            assert answer.document["error"].startswith(said), what
            assert answer.document["error_type"] == "validation"
        await still_serves(server)


@asynchronous
async def test_an_engine_without_a_tokenizer_takes_no_text() -> None:
    async with echo_server(EchoEngine()) as server:
        answer = await ask(server, "/generate", asking())
        assert (answer.status, answer.document["error_type"]) == (422, "validation")
        assert answer.document["error"].startswith("inputs: ")
        assert "without a tokenizer" in answer.document["error"]


@asynchronous
async def test_the_root_is_a_path_of_its_own() -> None:
    async with echo_server(ECHO) as server:
        answer = await ask(server, "/nothing", asking())
        assert answer.status == 404
        put = b"PUT / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert (await exchange(server.http_port, put)).status == 405


@asynchronous
async def test_an_error_ends_a_stream_as_its_last_event() -> None:
    async with echo_server(SLOW) as server:
        body = json.dumps(asking()).encode()
        asked = asyncio.create_task(exchange(server.http_port, post("/generate_stream", body)))
        while server.handle().loop.stats().running == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(server.handle().loop.stop)
        last = (await asked).body.removesuffix(b"\n\n").rpartition(b"data: ")[2]
        assert json.loads(last)["error_type"] in ("overloaded", "incomplete_generation")
