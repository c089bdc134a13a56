"""trtllm.TrtllmService over real gRPC, asked by the stubs of PyPI's smg-grpc-proto."""

import asyncio
import contextlib
import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.servers import EOS, TOKENIZER, EchoEngine, echo_server, greedy
from trtc.protos.smg import trtllm_service_pb2 as own
from trtc.runtime.client import AsyncClient
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.grpc.smg import requests

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # stubs made by an older protobuf than ours
    smg = pytest.importorskip("smg_grpc_proto", reason="make setup installs it")
    pb, pb_grpc = smg.trtllm_service_pb2, smg.trtllm_service_pb2_grpc

PROMPT = (5, 17, 9)
TEXT = EchoEngine(EchoOptions(vocab_size=4096), tokenizer=TOKENIZER)
ENDLESS = EchoEngine(EchoOptions(num_pages=1024, step_s=0.002, never=(EOS,)))


def request(prompt: Any = PROMPT, max_tokens: int = 12, **fields: Any) -> Any:
    sampling = fields.pop("sampling", {"temperature": 0.0})
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_token_ids=prompt),
        max_tokens=max_tokens,
        sampling_config=pb.SamplingConfig(**sampling),
        **{"ignore_eos": True, **fields},
    )


@dataclass
class Answer:
    chunks: list[Any] = field(default_factory=list)
    completes: list[Any] = field(default_factory=list)

    @property
    def streamed(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]


async def generate(channel: grpc.aio.Channel, message: Any) -> Answer:
    answer = Answer()
    async for response in pb_grpc.TrtllmServiceStub(channel).Generate(message):
        if response.WhichOneof("response") == "chunk":
            assert not answer.completes, "deltas come before the end"
            answer.chunks.append(response.chunk)
        else:
            answer.completes.append(response.complete)
    return answer


@asynchronous
async def test_what_the_server_and_its_model_are() -> None:
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = pb_grpc.TrtllmServiceStub(channel)
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).status == "OK"
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.model_id, info.max_seq_len, info.max_input_len) == ("echo", 1024, 1023)
        assert (info.vocab_size, info.max_batch_size) == (512, 64)
        facts = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (facts.tensor_parallel_size, facts.world_size) == (1, 1)
        server.server.service.models.set_ready("echo", "resting")
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).status == "echo: resting"


@asynchronous
async def test_tokens_are_those_of_every_protocol() -> None:
    async with (
        echo_server() as server,
        grpc.aio.insecure_channel(server.address) as channel,
        AsyncClient(server.address) as client,
    ):
        answer = await generate(channel, request(streaming=True))
        (complete,) = answer.completes
        assert answer.streamed == list(complete.output_token_ids) == greedy(PROMPT, 12)
        assert len(answer.chunks) > 1
        assert answer.chunks[-1].completion_tokens == complete.completion_tokens == 12
        assert (complete.prompt_tokens, complete.finish_reason) == (3, "length")
        whole = await generate(channel, request())
        assert not whole.chunks
        assert list(whole.completes[0].output_token_ids) == greedy(PROMPT, 12)
        sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "min_p": 0.01, "seed": 3}
        theirs = await client.generate(PROMPT, max_tokens=12, ignore_eos=True, **sampling).result()
        answer = await generate(channel, request(sampling=sampling, streaming=True))
        assert answer.streamed == list(theirs.token_ids)
        await server.idle()


@asynchronous
async def test_sequences_and_log_probabilities() -> None:
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        message = request(
            streaming=True,
            sampling={"temperature": 1.0, "num_return_sequences": 3, "seed": 1},
            output_config=pb.OutputConfig(logprobs=2, prompt_logprobs=1),
        )
        answer = await generate(channel, message)
        assert [one.sequence_index for one in answer.completes] == [0, 1, 2]
        for complete in answer.completes:
            chunks = [c for c in answer.chunks if c.sequence_index == complete.sequence_index]
            streamed = [token for chunk in chunks for token in chunk.token_ids]
            assert streamed == list(complete.output_token_ids)
            assert [one.token_id for one in complete.logprobs] == streamed
            assert {len(one.top_logprobs) for one in complete.logprobs} == {2}
        assert len(answer.completes[0].prompt_logprobs) == len(PROMPT) - 1


@asynchronous
async def test_tokens_that_end_a_sequence_are_left_out_and_counted() -> None:
    tokens = greedy(PROMPT, 12)
    stop, at = tokens[6], tokens.index(tokens[6])
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        for told in (False, True):
            message = request(
                streaming=True, stop_token_ids=[stop], include_stop_token_in_output=told
            )
            answer = await generate(channel, message)
            (complete,) = answer.completes
            assert answer.streamed == list(complete.output_token_ids) == tokens[: at + told]
            assert (complete.finish_reason, complete.matched_token_id) == ("stop", stop)
            assert complete.completion_tokens == at + 1


@asynchronous
async def test_stop_strings_end_a_sequence() -> None:
    async with (
        echo_server(TEXT) as server,
        grpc.aio.insecure_channel(server.address) as channel,
        AsyncClient(server.address) as client,
    ):
        whole = await client.generate(PROMPT, max_tokens=12, temperature=0.0).result()
        stop = whole.text[10:14]
        theirs = await client.generate(PROMPT, max_tokens=12, temperature=0.0, stop=stop).result()
        (complete,) = (await generate(channel, request(stop=[stop]))).completes
        assert list(complete.output_token_ids) == list(theirs.token_ids)
        assert (complete.finish_reason, complete.matched_stop_str) == ("stop", stop)


@asynchronous
async def test_a_running_request_is_aborted() -> None:
    async with echo_server(ENDLESS) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = pb_grpc.TrtllmServiceStub(channel)
        running = asyncio.create_task(
            generate(channel, request(max_tokens=900, request_id="a", streaming=True))
        )
        await eventually(lambda: server.server.service.num_open == 1, "it runs")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel, request(request_id="a"))
        assert "request_id" in caught.value.details()
        assert (await stub.Abort(pb.AbortRequest(request_id="a"))).success
        assert (await running).completes[0].finish_reason == "cancelled"
        again = await stub.Abort(pb.AbortRequest(request_id="a"))
        assert not again.success
        assert "no request called 'a'" in again.message
        await server.idle()


@asynchronous
async def test_streams_cut_at_any_message_free_their_pages() -> None:
    async with echo_server(ENDLESS) as server, grpc.aio.insecure_channel(server.address) as channel:
        for num_read in range(6):
            call = pb_grpc.TrtllmServiceStub(channel).Generate(
                request(max_tokens=900, streaming=True)
            )
            for _ in range(num_read):
                await call.read()
            call.cancel()
        await server.idle()
        await eventually(lambda: server.server.service.num_open == 0, "places are free")


NAN = float("nan")
# (fields of GenerateRequest, what the status must say)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ()}, "tokenized.input_token_ids: has no tokens"),
    ({"prompt": (512,)}, "tokenized.input_token_ids: token id 512"),
    ({"prompt": (1,) * 1024}, "tokenized.input_token_ids: has 1024 tokens"),
    ({"max_tokens": 0}, "max_tokens: is 0"),
    ({"max_tokens": 5000}, "max_tokens: is 5000"),
    ({"sampling": {"temperature": NAN}}, "sampling_config.temperature: is nan"),
    ({"sampling": {"top_k": -1}}, "sampling_config.top_k: is -1"),
    ({"sampling": {"num_return_sequences": 99}}, "sampling_config.num_return_sequences: is 99"),
    ({"sampling": {"min_tokens": 99}}, "sampling_config.min_tokens: is 99"),
    ({"sampling": {"beam_width": 4}}, "sampling_config.beam_width: is not supported"),
    ({"output_config": pb.OutputConfig(logprobs=99)}, "output_config.logprobs: is 99"),
    ({"output_config": pb.OutputConfig(prompt_logprobs=-1)}, "output_config.prompt_logprobs: is"),
    ({"embedding_bias": [1.0] * 3}, "embedding_bias: has 3 values. Send one for each of the 512"),
    ({"embedding_bias": [NAN] * 512}, "embedding_bias: is nan"),
    ({"stop": ["x"] * 17}, "stop (how many): is 17"),
    ({"stop_token_ids": [1] * 300}, "stop_token_ids (how many): is 300"),
    ({"request_id": "x" * 300}, "request_id: has 300 characters"),
    ({"bad_token_ids": [3]}, "bad_token_ids: is not supported"),
    (
        {"guided_decoding": pb.GuidedDecodingParams(guide_type=9, guide="{}")},
        "guided_decoding.guide_type: is not supported",
    ),
]


@asynchronous
async def test_every_bad_field_is_named_and_nothing_is_left() -> None:
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        for fields, said in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(channel, request(**fields))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
            assert said in caught.value.details(), caught.value.details()
            assert "\n" not in caught.value.details()
        await server.idle()
        bias = [0.0] * 512
        bias[7] = 100.0
        answer = await generate(channel, request(embedding_bias=bias))
        assert list(answer.completes[0].output_token_ids) == [7] * 12


@asynchronous
async def test_no_flipped_bytes_are_the_servers_fault() -> None:
    rng = random.Random(11)
    config = pb.OutputConfig(logprobs=1)
    whole = request(max_tokens=2, streaming=True, stop=["x"], output_config=config)
    async with echo_server(TEXT) as server, grpc.aio.insecure_channel(server.address) as channel:
        generate_bytes = channel.unary_stream("/trtllm.TrtllmService/Generate", bytes, bytes)
        codes = set()
        for _ in range(300):
            data = bytearray(whole.SerializeToString())
            for _ in range(rng.choice((1, 1, 2, 5))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            call = generate_bytes(bytes(data))
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            codes.add(await call.code())
        await server.idle()
        assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}


@asynchronous
async def test_a_server_of_several_engines_is_not_asked() -> None:
    async with (
        echo_server(names=("a", "b")) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="names no model") as caught:
            await generate(channel, request())
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


READ = {
    *("request_id", "tokenized.input_token_ids", "max_tokens", "streaming", "embedding_bias"),
    *("cache_salt_id", "stop", "stop_token_ids", "ignore_eos", "include_stop_token_in_output"),
    *("guided_decoding.guide_type", "guided_decoding.guide"),
    "sampling_config.num_return_sequences",
    *requests.NAMES.values(),
}
CHANGES_NOTHING = {
    *("tokenized.original_text", "arrival_time", "lookahead_config"),
    "output_config.exclude_input_from_output",
    *(f"disaggregated_params.{name}" for name in ("ctx_request_id", "context_phase_params")),
    *(
        f"sampling_config.{name}"
        for name in (
            *("top_p_min", "top_p_reset_ids"),  # of top_p_decay
            *("beam_search_diversity_rate", "length_penalty", "early_stopping"),
        )
    ),
}


def test_every_field_of_a_request_is_read_or_refused_or_changes_nothing() -> None:
    refused = {one.path for one in requests._REFUSED}
    known = READ | refused | CHANGES_NOTHING
    assert not (READ & refused) | (refused & CHANGES_NOTHING) | (READ & CHANGES_NOTHING)
    for one in own.GenerateRequest.DESCRIPTOR.fields:
        inner = one.message_type.fields if one.message_type else ()
        paths = {f"{one.name}.{nested.name}" for nested in inner}
        assert one.name in known or (paths and paths <= known), one.name
