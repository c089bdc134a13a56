"""KServe's service over real gRPC, asked by the unmodified tritonclient."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.servers import CONFIG, EOS, TOKENIZER, EchoEngine, echo_server, greedy
from tests.support.tensors import tensor, tensors
from tests.support.triton_client import ask, grpcclient, input_of, open_stream, refusal
from trtc.protos.kserve import grpc_service_pb2 as pb
from trtc.runtime.client import AsyncClient
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.grpc import intake
from trtc.runtime.frontends.grpc.kserve.messages import response_of
from trtc.runtime.frontends.grpc.kserve.methods import MODEL_INFER, MODEL_STREAM_INFER
from trtc.runtime.service.limits import ServiceLimits

PROMPT = (5, 17, 9)
TEXT = EchoEngine(EchoOptions(vocab_size=4096), tokenizer=TOKENIZER)
ENDLESS = EchoEngine(EchoOptions(num_pages=1024, step_s=0.002, never=(EOS,)))
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
IDS: dict[str, Any] = {"input_ids": list(PROMPT), "request_output_len": 12, "end_id": -1}


@asynccontextmanager
async def triton_client(address: str) -> AsyncIterator[Any]:
    import tritonclient.grpc.aio

    async with tritonclient.grpc.aio.InferenceServerClient(address) as client:
        yield client


def sent(**inputs: Any) -> list[Any]:
    return [input_of(name, array) for name, array in tensors(**inputs).items()]


def infer_request(model: str = "echo", **inputs: Any) -> pb.ModelInferRequest:
    """As clients of another language write it: values in the tensors themselves."""
    request = pb.ModelInferRequest(model_name=model)
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        request.inputs.add(
            name=name,
            datatype="INT32",
            shape=[1, len(values)],
            contents=pb.InferTensorContents(int_contents=values),
        )
    return request


def raw_infer(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(
        MODEL_INFER.path,
        request_serializer=bytes,
        response_deserializer=pb.ModelInferResponse.FromString,
    )


def raw_stream(channel: grpc.aio.Channel) -> Any:
    connect: Any = channel.stream_stream(
        MODEL_STREAM_INFER.path,
        request_serializer=bytes,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )
    return connect()


@asynchronous
async def test_what_a_server_and_its_models_are() -> None:
    async with echo_server() as server, triton_client(server.address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        ready = [await client.is_model_ready(*one) for one in (("echo",), ("echo", "1"))]
        assert ready == [True, True]
        assert not await client.is_model_ready("echo", "2")
        assert not await client.is_model_ready("none")
        assert (await client.get_server_metadata()).name == "trtc"

        metadata = await client.get_model_metadata("echo")
        shapes = {one.name: (one.datatype, list(one.shape)) for one in metadata.inputs}
        assert shapes["text_input"] == ("BYTES", [-1, 1])
        assert shapes["input_ids"] == ("INT32", [-1, -1])
        assert list(metadata.versions) == ["1"]

        config = (await client.get_model_config("echo")).config
        assert config.model_transaction_policy.decoupled
        assert config.max_batch_size == 64
        assert all(one.optional for one in config.input)
        assert {one.name for one in config.output} >= {"text_output", "output_ids"}

        (entry,) = (await client.get_model_repository_index()).models
        assert (entry.name, entry.version, entry.state) == ("echo", "1", "READY")
        server.server.service.models.set_ready("echo", "resting")
        (entry,) = (await client.get_model_repository_index()).models
        assert (entry.state, entry.reason) == ("UNAVAILABLE", "resting")
        assert not await client.is_server_ready()
        assert not await client.is_model_ready("echo")


@asynchronous
async def test_tokens_are_those_of_every_protocol() -> None:
    async with echo_server() as server, triton_client(server.address) as client:
        result = await client.infer("echo", sent(**IDS), request_id="mine")
        assert result.as_numpy("output_ids").tolist() == [[greedy(PROMPT, 12)]]
        assert result.as_numpy("sequence_length").tolist() == [[12]]
        assert result.as_numpy("finish_reason").tolist() == [b"length"]
        assert (result.get_response().id, result.get_response().model_version) == ("mine", "1")
        async with AsyncClient(server.address) as own:
            sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "seed": 3}
            theirs = await own.generate(PROMPT, max_tokens=12, ignore_eos=True, **sampling).result()
            result = await client.infer("echo", sent(**IDS, **sampling))
            assert result.as_numpy("output_ids").tolist() == [[list(theirs.token_ids)]]
        await server.idle()


@asynchronous
async def test_text_is_that_of_every_protocol() -> None:
    async with (
        echo_server(TEXT) as server,
        triton_client(server.address) as client,
        AsyncClient(server.address) as own,
    ):
        theirs = await own.generate("import os", max_tokens=10, temperature=0.0).result()
        request = {"text_input": "import os", "max_tokens": 10, "return_log_probs": True}
        result = await client.infer("echo", sent(**request))
        assert result.as_numpy("text_output").tolist() == [theirs.text.encode()]
        assert result.as_numpy("output_log_probs").shape == (1, 1, 10)
        whole = await client.infer(
            "echo", sent(**request, exclude_input_in_output=False, return_num_input_tokens=True)
        )
        assert whole.as_numpy("text_output").tolist() == [b"import os" + theirs.text.encode()]
        prompt = whole.as_numpy("output_ids").tolist()[0][0][: -len(theirs.token_ids)]
        assert whole.as_numpy("num_input_tokens").tolist() == [[len(prompt)]]
        ids = await client.infer(
            "echo", sent(input_ids=prompt, request_output_len=10, exclude_input_in_output=False)
        )
        assert ids.as_numpy("text_output").tolist() == whole.as_numpy("text_output").tolist()
        only = await client.infer(
            "echo", sent(**request), outputs=[grpcclient.InferRequestedOutput("text_output")]
        )
        assert [one.name for one in only.get_response().outputs] == ["text_output"]


@asynchronous
async def test_a_stream_has_a_message_a_step_and_says_which_is_the_last() -> None:
    async with echo_server() as server:
        port = server.server.frontends["grpc"].port
        messages = await asyncio.to_thread(ask, port, "echo", **IDS, streaming=True)
        assert [token for one in messages for token in one.token_ids] == greedy(PROMPT, 12)
        assert len(messages) > 1
        assert [one.final for one in messages] == [False] * (len(messages) - 1) + [True]
        (whole,) = await asyncio.to_thread(ask, port, "echo", **IDS)
        assert whole.token_ids == greedy(PROMPT, 12)
        assert whole.final
        await server.idle()


def load_of_perf_analyzer(port: int) -> dict[str, list[int]]:
    """Many requests on one stream, each known by its id, each done at its final message."""
    tokens: dict[str, list[int]] = {str(number): [] for number in range(40)}
    with open_stream(port) as stream:
        for number in range(40):
            stream.send(
                "echo",
                request_id=str(number),
                empty_final=True,
                input_ids=[number, 7],
                request_output_len=8,
                end_id=-1,
                streaming=number % 2 == 0,
            )
        unfinished = len(tokens)
        while unfinished:
            message = stream.receive()
            tokens[message.request_id] += message.token_ids
            unfinished -= message.final
    assert stream.is_empty
    return tokens


@asynchronous
async def test_many_requests_share_a_stream_and_are_counted() -> None:
    async with echo_server() as server, triton_client(server.address) as client:
        before = (await client.get_inference_statistics("echo")).model_stats[0]
        assert before.inference_count == 0
        port = server.server.frontends["grpc"].port
        tokens = await asyncio.to_thread(load_of_perf_analyzer, port)
        assert tokens == {str(number): greedy((number, 7), 8) for number in range(40)}
        after = (await client.get_inference_statistics()).model_stats[0]
        assert (after.inference_count, after.inference_stats.success.count) == (40, 40)
        assert after.inference_stats.queue.count == 40
        assert after.inference_stats.success.ns >= after.inference_stats.compute_infer.ns > 0
        assert after.execution_count >= 8
        await server.idle()


def rows_and_sequences(port: int) -> tuple[dict[int, list[int]], set[int]]:
    rows: dict[int, list[int]] = {0: [], 1: []}
    sequences = set()
    with open_stream(port) as stream:
        stream.send_rows(
            "echo",
            {
                "input_ids": [[1, 2], [3, 4]],
                "request_output_len": [3, 9],
                "end_id": [-1, -1],
                "streaming": [True, False],
            },
        )
        for message in stream.receive_all():
            rows[int(message.outputs["batch_index"][0][0])] += message.token_ids
        stream.send("echo", **IDS, num_return_sequences=3, temperature=1.0, top_k=9)
        for message in stream.receive_all():
            sequences.add(int(message.outputs["sequence_index"][0][0]))
    return rows, sequences


@asynchronous
async def test_rows_of_a_batch_and_sequences_of_a_row_are_told_apart() -> None:
    async with echo_server() as server:
        port = server.server.frontends["grpc"].port
        rows, sequences = await asyncio.to_thread(rows_and_sequences, port)
        assert rows == {0: greedy((1, 2), 3), 1: greedy((3, 4), 9)}
        assert sequences == {0, 1, 2}
        await server.idle()


def stop_one_of_two(port: int) -> list[str]:
    with open_stream(port) as stream, open_stream(port) as other:
        stream.send("echo", **{**IDS, "request_output_len": 900}, request_id="a", streaming=True)
        stream.receive()
        other.send("echo", request_id="a", input_ids=[0], stop=True)
        assert other.receive().final, "a stranger's request of that id is not its own to stop"
        stream.send("echo", request_id="a", input_ids=[0], stop=True)
        messages = [stream.receive() for _ in range(1)]
        while sum(one.final for one in messages) < 2:
            messages.append(stream.receive())
    return [one.finish_reason for one in messages if "finish_reason" in one.outputs]


@asynchronous
async def test_a_running_request_is_stopped_by_its_id() -> None:
    async with echo_server(ENDLESS) as server:
        port = server.server.frontends["grpc"].port
        assert await asyncio.to_thread(stop_one_of_two, port) == ["aborted"]
        await server.idle()


@asynchronous
async def test_streams_cut_at_any_message_free_their_pages() -> None:
    async with (
        echo_server(ENDLESS) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        request = infer_request(**{**IDS, "request_output_len": 900})
        request.inputs.add(
            name="streaming",
            datatype="BOOL",
            shape=[1, 1],
            contents=pb.InferTensorContents(bool_contents=[True]),
        )
        for num_read in range(6):
            call = raw_stream(channel)
            for number in range(3):
                request.id = str(number)
                await call.write(request.SerializeToString())
            for _ in range(num_read):
                await call.read()
            call.cancel()
        await server.idle()
        await eventually(lambda: server.server.service.num_open == 0, "places are free")


@asynchronous
async def test_a_deadline_or_a_timeout_ends_a_request() -> None:
    async with echo_server(ENDLESS) as server, triton_client(server.address) as client:
        long = sent(**{**IDS, "request_output_len": 900})
        with pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
            await client.infer("echo", long, timeout=100_000)
        with pytest.raises(Exception, match=r"DEADLINE_EXCEEDED|Deadline"):
            await client.infer("echo", long, client_timeout=0.1)
        await server.idle()


# (inputs of one row, what the message must say)
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "text_input: is missing"),
    ({"input_ids": [1], "text_input": "x"}, "text_input: is sent beside input_ids"),
    ({"input_ids": [1, 512]}, "input_ids: token id 512 is not in the vocabulary"),
    ({"input_ids": [-1]}, "input_ids: token id -1"),
    ({"input_ids": [1] * 1024}, "input_ids: has 1024 tokens"),
    ({"input_ids": [1], "request_output_len": 5000}, "request_output_len: is 5000"),
    ({"input_ids": [1], "max_tokens": -1}, "max_tokens: is -1"),
    ({"input_ids": [1], "top_p": 1.5}, "top_p: is 1.5"),
    ({"input_ids": [1], "temperature": float("nan"), "top_k": 2}, "temperature: is nan"),
    ({"input_ids": [1], "beam_width": 4}, "beam_width: is not supported"),
    ({"input_ids": [1], "bad_words": ["x"]}, "bad_words: is not supported"),
    ({"input_ids": [1], "lora_task_id": 7}, "lora_task_id: is not supported"),
    ({"text_input": "x"}, "text_input: engine echo was built without a tokenizer"),
    ({"input_ids": [1], "num_return_sequences": 9, "top_k": 4}, "asks for 9 sequences"),
    ({"input_ids": [1], "streaming": True}, "asks for a message each step"),
    ({"input_ids": [1], "stop": True}, "id: is empty"),
]


@asynchronous
async def test_every_bad_input_is_named_and_nothing_is_left() -> None:
    async with echo_server() as server, triton_client(server.address) as client:
        for inputs, said in BAD:
            with pytest.raises(Exception) as caught:
                await client.infer("echo", sent(**inputs))
            assert said in str(caught.value), (inputs, caught.value)
            assert "\n" not in str(caught.value)
        for model, version, said in (
            ("none", "", "model_name: no engine is called 'none'"),
            ("echo", "7", "model_version: is '7'"),
        ):
            for call in (client.get_model_metadata, client.get_model_config):
                with pytest.raises(Exception, match=f"NOT_FOUND.*{said}"):
                    await call(model, version)
            with pytest.raises(Exception, match=f"NOT_FOUND.*{said}"):
                await client.infer(model, sent(**IDS), model_version=version)
        for parameter in ({"priority": 3}, {"sequence_id": 5}, {"parameters": {"heat": 2}}):
            with pytest.raises(Exception, match=r"parameters\.\w+: is not supported"):
                await client.infer("echo", sent(**IDS), **parameter)
        with pytest.raises(Exception, match="'logits' is no output"):
            await client.infer(
                "echo", sent(**IDS), outputs=[grpcclient.InferRequestedOutput("logits")]
            )
        await server.idle()
        assert (await client.infer("echo", sent(**IDS))).as_numpy("output_ids") is not None


# (what is done to a good request, what the status must say)
def _twice(request: pb.ModelInferRequest) -> None:
    request.inputs.append(request.inputs[0])


def _shape(*shape: int) -> Any:
    def change(request: pb.ModelInferRequest) -> None:
        request.inputs[0].shape[:] = shape

    return change


def _datatype(name: str) -> Any:
    def change(request: pb.ModelInferRequest) -> None:
        request.inputs[0].datatype = name

    return change


def _raw(*contents: bytes) -> Any:
    def change(request: pb.ModelInferRequest) -> None:
        for one in request.inputs:
            one.ClearField("contents")
        request.raw_input_contents.extend(contents)

    return change


def _shared_memory(request: pb.ModelInferRequest) -> None:
    request.inputs[0].parameters["shared_memory_region"].string_param = "x"


def _classes(request: pb.ModelInferRequest) -> None:
    request.outputs.add(name="output_ids").parameters["classification"].int64_param = 3


def _both(request: pb.ModelInferRequest) -> None:
    request.raw_input_contents.append(b"\x01\0\0\0")


def _long_id(request: pb.ModelInferRequest) -> None:
    request.id = "x" * 300


def _rows(request: pb.ModelInferRequest) -> None:
    request.inputs[0].shape[:] = [3, 1]
    request.inputs[0].contents.int_contents[:] = [1, 2, 3]


BROKEN: list[tuple[Any, str]] = [
    (_twice, "input_ids: is given twice"),
    (_shape(1, 2), "input_ids: has 1 values. Its shape and datatype need 2 values"),
    (_shape(1), "input_ids: has the shape [1]"),
    (_shape(-1, -1), "input_ids: has the shape [-1, -1]"),
    (_shape(2**62, 2**62), "input_ids: has 1 values"),
    (_shape(*[1] * 5000), "input_ids: has the shape [1, 1, 1, 1, 1, 1, 1, 1]"),
    (_shape(0, 1), "input_ids: has 1 values"),
    (_datatype("FP32"), "input_ids: is 'FP32'. Send INT32"),
    (_datatype("INT4"), "input_ids: is 'INT4'"),
    (_datatype("INT64"), "input_ids: is 'INT64' and has int_contents"),
    (_raw(b"\x01\0\0"), "input_ids: has 3 bytes"),
    (_raw(b"\x01\0\0\0", b""), "raw_input_contents: has 2 entries for 1 inputs"),
    (_both, "input_ids: has contents beside raw_input_contents"),
    (_shared_memory, "inputs[0].parameters.shared_memory_region: is not supported"),
    (_classes, "outputs[0].parameters.classification: is not supported"),
    (_long_id, "id: has 300 characters"),
    (_rows, "inputs: has 3 rows, which one reply cannot hold"),
]


@asynchronous
async def test_every_broken_message_is_the_callers_error() -> None:
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        infer = raw_infer(channel)
        for change, said in BROKEN:
            request = infer_request(input_ids=[1])
            change(request)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(request.SerializeToString())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, said
            assert said in caught.value.details(), caught.value.details()
        whole = infer_request(**IDS).SerializeToString()
        codes = set()
        for end in range(len(whole)):
            call = infer(whole[:end])
            codes.add(await call.code())
        assert codes == {
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.OK,  # inputs are missing
        }
        await server.idle()


@asynchronous
async def test_no_flipped_bytes_are_the_servers_fault() -> None:
    rng = random.Random(11)
    whole = infer_request(**{**IDS, "request_output_len": 2}).SerializeToString()
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        infer, codes = raw_infer(channel), set()
        for _ in range(300):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 1, 2, 5))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            codes.add(await infer(bytes(data)).code())
        await server.idle()
        assert codes <= {
            grpc.StatusCode.OK,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
        }


@asynchronous
async def test_connections_wait_for_their_share_of_listening_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "MAX_LISTENING", 8)
    monkeypatch.setattr(intake, "TURN_S", 0.2)
    async with (
        echo_server() as server,
        grpc.aio.insecure_channel(server.address) as greedy_one,
        grpc.aio.insecure_channel(server.address, OWN_CONNECTION) as modest,
    ):
        request = infer_request(**IDS).SerializeToString()
        streams = [raw_stream(greedy_one) for _ in range(3)]
        for stream in streams:
            await stream.write(request)
        answers = await asyncio.gather(*(one.read() for one in streams), return_exceptions=True)
        refused = [one for one in answers if isinstance(one, grpc.aio.AioRpcError)]
        assert [one.code() for one in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        other = raw_stream(modest)
        await other.write(request)
        assert (await other.read()).infer_response.outputs
        for stream in (*streams, other):
            stream.cancel()


@asynchronous
async def test_more_rows_than_the_model_takes_are_refused() -> None:
    async with echo_server() as server:
        port = server.server.frontends["grpc"].port

        def send() -> str:
            with open_stream(port) as stream:
                stream.send_rows("echo", {"input_ids": [[1]] * 65})
                with pytest.raises(Exception) as caught:
                    stream.receive()
            return str(caught.value)

        assert "input_ids: has 65 rows. Send 1 to 64" in await asyncio.to_thread(send)


@asynchronous
async def test_rows_are_admitted_together_or_not_at_all() -> None:
    config = replace(CONFIG, limits=ServiceLimits(max_streams=4))
    async with echo_server(ENDLESS, config=config) as server:
        port = server.server.frontends["grpc"].port

        def send() -> str:
            with open_stream(port) as stream:
                stream.send_rows("echo", {"input_ids": [[1]] * 4, "request_output_len": [900] * 4})
                with pytest.raises(Exception) as caught:
                    stream.receive()
            return str(caught.value)

        assert "open streams" in await asyncio.to_thread(send)
        await server.idle()
        assert server.server.service.num_open == 0


@asynchronous
async def test_an_error_ends_its_request_and_not_the_stream() -> None:
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        port = server.server.frontends["grpc"].port
        said = await asyncio.to_thread(refusal, port, "echo", input_ids=[512])
        assert said.startswith("input_ids: token id 512")
        call = raw_stream(channel)
        bad, good = infer_request("none", **IDS), infer_request(**IDS)
        bad.id, good.id = "bad", "good"
        for data in (bad.SerializeToString(), b"garbage", good.SerializeToString()):
            await call.write(data)
        await call.done_writing()
        answers = [one async for one in call]
        assert [one.infer_response.id for one in answers] == ["bad", "", "good"]
        assert "no engine is called 'none'" in answers[0].error_message
        assert "not a valid message" in answers[1].error_message
        assert answers[2].error_message == ""
        assert await call.code() is grpc.StatusCode.OK
        await server.idle()


@asynchronous
async def test_other_widths_of_numbers_mean_the_same() -> None:
    """Older clients of tensorrtllm_backend send lengths and ids as UINT32."""
    async with echo_server() as server, triton_client(server.address) as client:
        inputs = [
            input_of("input_ids", np.array([PROMPT], np.int64)),
            input_of("request_output_len", np.array([[12]], np.uint32)),
            input_of("end_id", np.array([[-1]], np.int64)),
            input_of("temperature", np.array([[0.0]], np.float64)),
        ]
        result = await client.infer("echo", inputs)
        assert result.as_numpy("output_ids").tolist() == [[greedy(PROMPT, 12)]]


@asynchronous
async def test_a_stream_that_asks_for_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "IDLE_S", 0.1)
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        silent, asking = raw_stream(channel), raw_stream(channel)
        await asking.write(infer_request(**IDS).SerializeToString())
        assert (await asking.read()).infer_response.outputs
        for call in (silent, asking):
            assert await call.code() is grpc.StatusCode.CANCELLED
            assert "no request for 0.1 s" in await call.details()


@asynchronous
async def test_a_client_that_never_reads_loses_its_requests_and_stalls_nobody() -> None:
    engine = EchoEngine(EchoOptions(num_pages=1024, max_seq_len=8192, step_s=0.0002, never=(EOS,)))
    config = replace(CONFIG, limits=ServiceLimits(max_unread_tokens=64))
    narrow = (("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0))
    async with (
        echo_server(engine, config=config) as server,
        grpc.aio.insecure_channel(server.address, options=narrow) as channel,
        triton_client(server.address) as client,
    ):
        call = raw_stream(channel)
        request = infer_request(input_ids=[1], request_output_len=8000)
        for name in ("streaming", "return_log_probs"):
            request.inputs.add(
                name=name,
                datatype="BOOL",
                shape=[1, 1],
                contents=pb.InferTensorContents(bool_contents=[True]),
            )
        for _ in range(3):
            await call.write(request.SerializeToString())
        await eventually(lambda: server.server.service.num_open == 3, "they run")
        result = await client.infer("echo", sent(**IDS))
        assert result.as_numpy("output_ids").tolist() == [[greedy(PROMPT, 12, engine.options)]]
        await server.idle(timeout=20)
        assert server.server.service.num_open == 0
        call.cancel()


def test_a_reply_has_what_the_arrays_say() -> None:
    array = tensor("text_input", ["ab"])
    assert array.dtype == object
    from trtc.runtime.tensors.inference import InferRequest, Reply

    request = InferRequest("m", "id", (), frozenset())
    message = {"text_output": np.array([b"ab"], object), "output_ids": np.array([[[7]]], np.int32)}
    response = response_of(request, Reply(message, final=True))
    assert [(one.name, one.datatype, list(one.shape)) for one in response.outputs] == [
        ("text_output", "BYTES", [1]),
        ("output_ids", "INT32", [1, 1, 1]),
    ]
    assert list(response.raw_output_contents) == [b"\x02\0\0\0ab", b"\x07\0\0\0"]
