"""KServe's protocol over HTTP, asked by the unmodified tritonclient and by plain requests."""

import asyncio
import io
import json
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.servers import EOS, TOKENIZER, EchoEngine, RunningServer, echo_server, greedy
from tests.support.tensors import tensors
from trtc.runtime.client import AsyncClient
from trtc.runtime.executors.echo import EchoOptions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # gevent warns about itself
    import aiohttp

    triton = pytest.importorskip("tritonclient.http", reason="make setup installs it")
    import tritonclient.http.aio
from tritonclient.utils import np_to_triton_dtype

PROMPT = (5, 17, 9)
TEXT = EchoEngine(EchoOptions(vocab_size=4096), tokenizer=TOKENIZER)
ENDLESS = EchoEngine(EchoOptions(num_pages=1024, step_s=0.002, never=(EOS,)))
IDS: dict[str, Any] = {"input_ids": list(PROMPT), "request_output_len": 12, "end_id": -1}
INFER = "/v2/models/echo/infer"
GENERATE = "/v2/models/echo/generate"


@asynccontextmanager
async def triton_client(server: RunningServer) -> AsyncIterator[Any]:
    async with tritonclient.http.aio.InferenceServerClient(f"127.0.0.1:{server.http_port}") as one:
        yield one


def sent(*, binary: bool = True, **inputs: Any) -> list[Any]:
    found = []
    for name, array in tensors(**inputs).items():
        one = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        found.append(one.set_data_from_numpy(array, binary_data=binary))
    return found


class Plain:
    """Requests without a library of the protocol."""

    def __init__(self, server: RunningServer, session: aiohttp.ClientSession) -> None:
        self._root = f"http://127.0.0.1:{server.http_port}"
        self._session = session

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self._root + path) as response:
            body = await response.read()
            return response.status, json.loads(body) if body else None

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named.setdefault("content-type", "application/json")
        async with self._session.post(self._root + path, data=data, headers=named) as response:
            said = await response.read()
            return response.status, json.loads(said) if said else None

    async def events(self, path: str, body: Any) -> list[Any]:
        async with self._session.post(self._root + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = await response.text()
        return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]


@asynccontextmanager
async def plain(server: RunningServer) -> AsyncIterator[Plain]:
    async with aiohttp.ClientSession() as session:
        yield Plain(server, session)


@asynchronous
async def test_what_a_server_and_its_models_are() -> None:
    async with echo_server(names=("echo", "b/c")) as server, triton_client(server) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        for name in ("echo", "b/c"):
            assert await client.is_model_ready(name)
            assert await client.is_model_ready(name, "1")
            assert (await client.get_model_metadata(name))["name"] == name
            assert (await client.get_model_config(name, "1"))["max_batch_size"] == 64
        assert not await client.is_model_ready("echo", "2")
        assert not await client.is_model_ready("none")
        assert "generate" in (await client.get_server_metadata())["extensions"]
        index = await client.get_model_repository_index()
        assert [one["state"] for one in index] == ["READY", "READY"]
        told = (await client.get_inference_statistics())["model_stats"]
        assert [one["name"] for one in told] == ["echo", "b/c"]
        assert (await client.get_inference_statistics("echo"))["model_stats"] == told[:1]
        server.server.service.models.set_ready("echo", "resting")
        assert not await client.is_server_ready()
        assert not await client.is_model_ready("echo")


@asynchronous
async def test_tokens_are_those_of_every_protocol_as_bytes_and_as_json() -> None:
    async with (
        echo_server() as server,
        triton_client(server) as client,
        AsyncClient(server.address) as own,
    ):
        sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "seed": 3}
        theirs = await own.generate(PROMPT, max_tokens=12, ignore_eos=True, **sampling).result()
        for binary in (True, False):
            inputs = sent(binary=binary, **IDS)
            outputs = None if binary else [triton.InferRequestedOutput("output_ids", binary)]
            result = await client.infer("echo", inputs, request_id="mine", outputs=outputs)
            assert result.as_numpy("output_ids").tolist() == [[greedy(PROMPT, 12)]]
            assert result.get_response()["id"] == "mine"
            result = await client.infer("echo", sent(binary=binary, **IDS, **sampling))
            assert result.as_numpy("output_ids").tolist() == [[list(theirs.token_ids)]]
        await server.idle()


@asynchronous
async def test_the_blocking_client_reads_the_same_text() -> None:
    async with echo_server(TEXT) as server, AsyncClient(server.address) as own:
        theirs = await own.generate("import os", max_tokens=10, temperature=0.0).result()

        def ask(binary: bool) -> Any:
            with triton.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
                inputs = sent(binary=binary, text_input="import os", max_tokens=10)
                return client.infer("echo", inputs).as_numpy("text_output").tolist()

        for binary in (True, False):
            assert await asyncio.to_thread(ask, binary) == [theirs.text.encode()]


@asynchronous
async def test_generate_answers_whole_and_in_events() -> None:
    async with (
        echo_server(TEXT) as server,
        plain(server) as http,
        AsyncClient(server.address) as own,
    ):
        theirs = await own.generate("import os", max_tokens=10, temperature=0.0).result()
        asked = {"id": "a", "text_input": "import os", "max_tokens": 10, "bad_words": ""}
        status, whole = await http.post(GENERATE, asked)
        assert (status, whole["text_output"], whole["id"]) == (200, theirs.text, "a")
        assert whole["output_ids"] == list(theirs.token_ids)
        nested = {"text_input": "import os", "parameters": {"max_tokens": 10, "stop_words": [""]}}
        assert (await http.post(GENERATE, nested))[1]["text_output"] == theirs.text
        # As curl sends it by itself.
        form = "application/x-www-form-urlencoded"
        assert (await http.post(GENERATE, asked, content_type=form))[0] == 200

        stream = f"{GENERATE}_stream"
        events = await http.events(stream, {**asked, "stream": True})
        assert len(events) > 1
        assert "".join(one["text_output"] for one in events) == theirs.text
        assert events[-1]["finish_reason"] == "length"
        (one,) = await http.events("/v2/models/echo/versions/1/generate_stream", asked)
        assert one["text_output"] == theirs.text
        samples = await http.events(stream, {**asked, "num_return_sequences": 3, "top_k": 4})
        assert {one["sequence_index"] for one in samples} == {0, 1, 2}
        await server.idle()


@asynchronous
async def test_an_error_after_the_first_token_is_the_last_event() -> None:
    async with echo_server(ENDLESS) as server, plain(server) as http:
        asked = {**IDS, "request_output_len": 900, "streaming": True, "timeout": 200_000}
        *events, last = await http.events(f"{GENERATE}_stream", asked)
        assert events
        assert set(last) == {"error"}
        await server.idle()


@asynchronous
async def test_clients_that_leave_free_their_pages() -> None:
    async with echo_server(ENDLESS) as server, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.http_port}{GENERATE}_stream"
        for num_read in range(4):
            body = {**IDS, "request_output_len": 900, "streaming": True}
            response = await session.post(url, json=body)
            for _ in range(num_read):
                await response.content.readline()
            response.close()
        await eventually(lambda: server.server.service.num_open == 0, "places are free")
        await server.idle()


INPUT: dict[str, Any] = {"name": "input_ids", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}


def body_of(**changes: Any) -> dict[str, Any]:
    return {"inputs": [{**INPUT, **changes}]}


# (path, body, status, what the error must say)
BAD: list[tuple[str, Any, int, str]] = [
    (INFER, {"inputs": []}, 400, "text_input: is missing"),
    (INFER, body_of(name="ids"), 400, "'ids' is no input of the model"),
    (INFER, body_of(datatype="FP32"), 400, "input_ids: is 'FP32'. Send INT32"),
    (INFER, body_of(shape=[1, 3]), 400, "input_ids: has 2 values"),
    (INFER, body_of(shape=[2]), 400, "input_ids: has the shape [2]"),
    (INFER, body_of(shape=[2**40, 2**40]), 400, "input_ids: has 2 values"),
    (INFER, body_of(data=[1, 2.5]), 400, "input_ids: has a value that is not INT32"),
    (INFER, body_of(data=[1, True]), 400, "input_ids: has a value that is not INT32"),
    (INFER, body_of(data=[1, "2"]), 400, "input_ids: has a value that is not INT32"),
    (INFER, body_of(data=[1, 2**31]), 400, "input_ids: has a value that is not INT32"),
    (INFER, body_of(data=[1, None]), 400, "input_ids: has a value that is not INT32"),
    (INFER, body_of(data=[[[[[[[[[[1, 2]]]]]]]]]]), 400, "more than 8 levels"),
    (INFER, body_of(data=[1, 512]), 400, "input_ids: token id 512"),
    (INFER, {"inputs": [INPUT, INPUT]}, 400, "input_ids: is given twice"),
    (INFER, {**body_of(), "parameters": {"priority": 2}}, 400, "parameters.priority: is not"),
    (INFER, {**body_of(), "outputs": [{"name": "x"}]}, 400, "'x' is no output"),
    (INFER, body_of(parameters={"binary_data_size": 8}), 400, "and 0 bytes follow"),
    (INFER, body_of(parameters={"shared_memory_region": "x"}), 400, "is not supported"),
    ("/v2/models/none/infer", body_of(), 404, "model_name: no engine is called 'none'"),
    ("/v2/models/echo/versions/9/infer", body_of(), 404, "model_version: is '9'"),
    ("/v2/models/echo/brew", body_of(), 404, "/v2/models/echo/brew: is not there"),
    (GENERATE, {}, 400, "text_input: is missing"),
    (GENERATE, {"input_ids": [1], "id": 5}, 400, "id: is no string"),
    (GENERATE, {"input_ids": [1], "parameters": 5}, 400, "parameters: is no object"),
    (GENERATE, {"input_ids": [1], "heat": 5}, 400, "parameters.heat: is not supported"),
    (GENERATE, {"input_ids": [1], "max_tokens": "5"}, 400, "max_tokens: has a value that is not"),
    (GENERATE, {"input_ids": [1], "max_tokens": [5, 6]}, 400, "max_tokens: has the shape [1, 2]"),
    (GENERATE, {"input_ids": {"a": 1}}, 400, "input_ids: has a value that is not"),
    (GENERATE, {"text_input": "x"}, 400, "text_input: engine echo was built without a tokenizer"),
    (GENERATE, {"input_ids": [1], "streaming": True}, 400, "asks for a message each step"),
    (f"{GENERATE}_stream", {"input_ids": [512]}, 400, "input_ids: token id 512"),
]


@asynchronous
async def test_every_bad_body_is_refused_by_name_and_nothing_is_left() -> None:
    async with echo_server() as server, plain(server) as http:
        for path, body, status, said in BAD:
            found, answer = await http.post(path, body)
            assert found == status, (body, answer)
            assert said in answer["error"], answer
            assert "\n" not in answer["error"]
        for length in ("-1", "x", "9" * 30, "100000"):
            found, answer = await http.post(
                INFER, body_of(), inference_header_content_length=length
            )
            assert found == 400
            assert "Inference-Header-Content-Length: is" in answer["error"]
        found, answer = await http.post(INFER, json.dumps(body_of()).encode() + b"xx")
        assert found == 400
        found, answer = await http.post(
            GENERATE, {"input_ids": [1]}, content_type="text/plain", origin="http://evil.example"
        )
        assert found == 415
        assert (await http.get("/v2/models/echo/brew"))[0] == 404
        await server.idle()


@asynchronous
async def test_bytes_after_the_json_are_the_tensors() -> None:
    async with echo_server() as server, plain(server) as http:
        raw = np.array(PROMPT, np.int32).tobytes()
        document = json.dumps(
            {
                "inputs": [
                    {
                        "name": "input_ids",
                        "datatype": "INT32",
                        "shape": [1, 3],
                        "parameters": {"binary_data_size": len(raw)},
                    },
                    {"name": "end_id", "datatype": "INT32", "shape": [1, 1], "data": [-1]},
                    {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [12]},
                ]
            }
        ).encode()
        length = str(len(document))
        found, answer = await http.post(
            INFER, document + raw, inference_header_content_length=length
        )
        assert found == 200
        told = {one["name"]: one["data"] for one in answer["outputs"]}
        assert told["output_ids"] == greedy(PROMPT, 12)
        for body in (document + raw[:-1], document + raw + b"x"):
            found, answer = await http.post(INFER, body, inference_header_content_length=length)
            assert (found, "bytes" in answer["error"]) == (400, True)
