"""Generate over real gRPC: tokens, text, concurrency, ends of every kind."""

import asyncio
import random
import shutil
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.servers import CONFIG, EOS, TOKENIZER, EchoEngine, echo_server, greedy
from trtc.protos.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    NoTokenizerError,
    UnavailableError,
    UnknownModelError,
    UnknownRequestError,
)
from trtc.protos.sampling import SamplingDefaults
from trtc.runtime.client import AsyncClient
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.grpc.frontend import GrpcConfig
from trtc.runtime.frontends.http.port import HttpConfig
from trtc.runtime.requests.generate_options import GenerateOptions
from trtc.runtime.requests.request import FinishReason

BIG = EchoOptions(num_pages=4096, max_batch_size=128, max_num_tokens=1024)
SLOW = EchoOptions(step_s=0.02, never=(EOS,))
TEXT = EchoEngine(EchoOptions(vocab_size=4096), tokenizer=TOKENIZER)


@asynchronous
async def test_greedy_tokens_are_the_engines() -> None:
    async with echo_server() as server, AsyncClient(server.address) as client:
        generation = client.generate([5, 17, 9], max_tokens=40, temperature=0.0, ignore_eos=True)
        outputs = [output async for output in generation]
        tokens = [token for output in outputs for token in output.token_ids]
        assert tokens == greedy([5, 17, 9], 40)
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert outputs[-1].usage.prompt_tokens == 3
        assert outputs[-1].usage.completion_tokens == 40
        assert {output.request_id for output in outputs} == {generation.request_id}
        await server.idle()


@asynchronous
async def test_five_hundred_streams_at_once_each_get_their_own_tokens() -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(512) for _ in range(rng.randint(1, 40))] for _ in range(500)]
    engine = EchoEngine(BIG)
    async with echo_server(engine) as server, AsyncClient(server.address) as client:

        async def complete(number: int) -> bool:
            count = 5 + number % 20
            generation = client.generate(
                prompts[number], max_tokens=count, temperature=0.0, ignore_eos=True
            )
            result = await generation.result()
            assert list(result.token_ids) == greedy(prompts[number], count)
            assert result.usage.completion_tokens == count
            return True

        assert all(await asyncio.gather(*(complete(number) for number in range(500))))
        await server.idle()


@asynchronous
async def test_text_in_text_out() -> None:
    async with echo_server(TEXT) as server, AsyncClient(server.address) as client:
        token_ids = await client.tokenize("import os")
        result = await client.generate(
            "import os", max_tokens=24, temperature=0.0, ignore_eos=True
        ).result()
        assert list(result.token_ids) == greedy(token_ids, 24, TEXT.options)
        assert result.text == await client.detokenize(result.token_ids)
        assert result.usage.prompt_tokens == len(token_ids)


@asynchronous
async def test_a_long_text_is_tokenised_off_the_loop_and_is_the_same() -> None:
    text = "def f(x):\n    return x\n" * 100
    async with echo_server(TEXT) as server, AsyncClient(server.address) as client:
        token_ids = await client.tokenize(text)
        assert await client.detokenize(token_ids) == text
        result = await client.generate(text, max_tokens=2, temperature=0.0).result()
        assert list(result.token_ids) == greedy(token_ids, 2, TEXT.options)


@asynchronous
async def test_a_chat_goes_through_the_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi ✓"}]
    wanted = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi ✓<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    async with echo_server(TEXT) as server, AsyncClient(server.address) as client:
        token_ids = await client.tokenize_chat(messages)
        assert await client.detokenize(token_ids, keep_special_tokens=True) == wanted
        parts = {"role": "user", "content": [{"type": "text", "text": "Hi ✓"}]}
        assert await client.tokenize_chat([messages[0], parts]) == token_ids
        started = await client.tokenize_chat(
            [*messages, {"role": "assistant", "content": "Yes"}], continue_final_message=True
        )
        assert await client.detokenize(started, keep_special_tokens=True) == wanted + "Yes"
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.tool_calls\[0\]\.function"):
            call = {"function": {"name": "f", "arguments": "{"}}
            await client.tokenize_chat([{"role": "assistant", "tool_calls": [call]}])
        result = await client.chat(messages, max_tokens=5, temperature=0.0).result()
        assert list(result.token_ids) == greedy(token_ids, 5, TEXT.options)


@asynchronous
async def test_several_sequences_and_logprobs() -> None:
    async with echo_server() as server, AsyncClient(server.address) as client:
        result = await client.generate(
            [1, 2, 3], max_tokens=6, n=3, logprobs=4, temperature=1.0, seed=5, ignore_eos=True
        ).result()
        assert [one.index for one in result.completions] == [0, 1, 2]
        assert len({one.token_ids for one in result.completions}) == 3
        assert result.usage.completion_tokens == 18
        scored = await client.generate([1, 2, 3], max_tokens=1, prompt_logprobs=1).result()
        assert [entry.token_id for entry in scored.prompt_logprobs] == [2, 3]
        for completion in result.completions:
            assert len(completion.logprobs) == len(completion.token_ids) == 6
            for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
                assert entry.token_id == token
                assert len(entry.top) == 4
                values = [value for _, value in entry.top]
                assert values == sorted(values, reverse=True)
        await server.idle()


@asynchronous
async def test_one_seed_gives_the_same_tokens_alone_and_in_a_crowd() -> None:
    async with echo_server(EchoEngine(BIG)) as server, AsyncClient(server.address) as client:

        async def sample(seed: int) -> tuple[int, ...]:
            generation = client.generate([4, 4], max_tokens=20, temperature=0.9, seed=seed)
            return (await generation.result()).token_ids

        alone = await sample(3)
        crowd = await asyncio.gather(*(sample(seed) for seed in range(40)))
        assert crowd[3] == alone
        assert len(set(crowd)) == 40


@asynchronous
async def test_the_stop_string_ends_the_text() -> None:
    async with echo_server(TEXT) as server, AsyncClient(server.address) as client:
        whole = (await client.generate("a", max_tokens=30, temperature=0.0).result()).text
        stop = whole[len(whole) // 2 :][:3]
        options = GenerateOptions(max_tokens=30, temperature=0.0, stop=stop)
        cut = await client.generate("a", **options).result()
        assert cut.text == whole[: whole.index(stop)]
        assert cut.finish_reason is FinishReason.STOP
        assert cut.completions[0].matched_stop == stop
        options["include_stop"] = True
        kept = await client.generate("a", **options).result()
        assert kept.text == whole[: whole.index(stop)] + stop


@asynchronous
async def test_cancel_frees_the_pages_within_a_step() -> None:
    async with echo_server(EchoEngine(SLOW)) as server, AsyncClient(server.address) as client:
        generations = [client.generate([number], max_tokens=900) for number in range(20)]
        for generation in generations:
            await anext(generation)
        # A step's tokens are delivered before its statistics are published.
        await eventually(lambda: server.handle().loop.stats().running == 20, "20 run")
        for generation in generations:
            generation.cancel()
        await server.idle(timeout=2.0)
        with pytest.raises(CancelledError):
            await anext(generations[0])
        assert server.server.service.num_open == 0


@asynchronous
async def test_a_client_that_vanishes_frees_its_pages() -> None:
    async with echo_server(EchoEngine(SLOW)) as server:
        client = AsyncClient(server.address)
        generations = [client.generate([number], max_tokens=900) for number in range(8)]
        for generation in generations:
            await anext(generation)
        await client.close()
        await server.idle(timeout=2.0)


@asynchronous
async def test_the_deadline_ends_a_request() -> None:
    async with echo_server(EchoEngine(SLOW)) as server, AsyncClient(server.address) as client:
        begin = asyncio.get_running_loop().time()
        generation = client.generate([1], max_tokens=900, timeout=0.3)
        with pytest.raises(DeadlineError):
            await generation.result()
        assert asyncio.get_running_loop().time() - begin < 2
        await server.idle(timeout=2.0)


@asynchronous
async def test_abort_ends_the_stream_with_a_result() -> None:
    async with echo_server(EchoEngine(SLOW)) as server, AsyncClient(server.address) as client:
        generation = client.generate([1], max_tokens=900, request_id="mine")
        await anext(generation)
        await client.abort("mine")
        result = await generation.result()
        assert result.finish_reason is FinishReason.ABORTED
        assert result.request_id == "mine"
        await server.idle(timeout=2.0)
        with pytest.raises(UnknownRequestError, match="no request called 'mine' is running"):
            await client.abort("mine")


@asynchronous
async def test_a_request_id_is_free_again_only_when_its_request_has_ended() -> None:
    async with echo_server(EchoEngine(SLOW)) as server, AsyncClient(server.address) as client:
        first = client.generate([1], max_tokens=900, request_id="twin")
        await anext(first)
        with pytest.raises(InvalidRequestError, match="twin"):
            await client.generate([1], max_tokens=1, request_id="twin").result()
        await client.abort("twin")
        await first.result()
        result = await client.generate([1], max_tokens=1, request_id="twin").result()
        assert result.request_id == "twin"


@asynchronous
async def test_engines_are_chosen_by_name() -> None:
    async with (
        echo_server(names=("left", "right")) as server,
        AsyncClient(server.address) as client,
    ):
        assert [info.name for info in await client.info()] == ["left", "right"]
        for name in ("left", "right"):
            result = await client.generate([3], max_tokens=3, model=name).result()
            assert result.usage.completion_tokens <= 3
        for name in ("", "middle"):
            with pytest.raises(UnknownModelError, match="Choose one of: left, right") as caught:
                await client.generate([3], max_tokens=3, model=name).result()
            assert caught.value.field == "model"


@asynchronous
async def test_model_info_is_the_manifests() -> None:
    async with echo_server(TEXT) as server, AsyncClient(server.address) as client:
        (info,) = await client.info()
        manifest = server.handle().manifest
        assert info.engine_digest == manifest.digest
        assert info.vocab_size == 4096
        assert info.max_seq_len == manifest.limits.max_seq_len
        assert info.num_pages == server.handle().num_pages
        assert info.has_tokenizer
        assert info.has_chat_template
        assert info.eos_token_ids == (EOS,)


@asynchronous
async def test_a_template_that_does_not_compile_is_none_once_that_is_known(tmp_path: Path) -> None:
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    engine = replace(TEXT, tokenizer=tmp_path)
    async with echo_server(engine) as server, AsyncClient(server.address) as client:
        with pytest.raises(NoTokenizerError, match="is not valid Jinja"):
            await client.chat([{"role": "user", "content": "a"}], max_tokens=1).result()
        (info,) = await client.info()
        assert info.has_tokenizer
        assert not info.has_chat_template


@asynchronous
async def test_the_models_sampling_defaults_hold_unless_the_request_or_the_operator_says() -> None:
    defaults = SamplingDefaults(temperature=0.0, max_tokens=6)
    engine = EchoEngine(BIG, sampling_defaults=defaults)
    wanted = greedy((5, 6), 6, BIG)
    async with echo_server(engine) as server, AsyncClient(server.address) as client:
        (info,) = await client.info()
        assert info.sampling_defaults == {"temperature": 0.0}
        assert info.default_max_tokens == 6
        absent = await client.generate([5, 6], ignore_eos=True).result()
        drawn = await client.generate([5, 6], temperature=1.0, seed=1, ignore_eos=True).result()
        assert list(absent.token_ids) == wanted
        assert list(drawn.token_ids) != wanted
    config = replace(CONFIG, engine=EngineConfig(generation_config="trtc"))
    async with echo_server(engine, config=config) as server, AsyncClient(server.address) as client:
        (info,) = await client.info()
        assert (info.sampling_defaults, info.default_max_tokens) == ({}, None)
        result = await client.generate([5, 6], seed=1, max_tokens=6, ignore_eos=True).result()
        assert list(result.token_ids) != wanted


@asynchronous
async def test_an_engine_without_a_tokenizer_takes_token_ids_only() -> None:
    async with echo_server() as server, AsyncClient(server.address) as client:
        message = {"role": "user", "content": "hi"}
        for ask in (
            client.generate("hi", max_tokens=1).result(),
            client.chat([message], max_tokens=1).result(),
            client.generate([1], max_tokens=1, stop="x").result(),
            client.tokenize("hi"),
            client.tokenize_chat([message]),
            client.detokenize([1, 2]),
        ):
            with pytest.raises(NoTokenizerError, match="tokenizer"):
                await ask
        result = await client.generate([1], max_tokens=2).result()
        assert result.text == ""
        assert result.token_ids
        await server.idle()


@asynchronous
async def test_the_engines_death_ends_every_stream_with_one_error() -> None:
    dying = EchoEngine(EchoOptions(step_s=0.01, fail_at_step=20))
    async with echo_server(dying) as server, AsyncClient(server.address) as client:

        async def complete(number: int) -> str:
            with pytest.raises(UnavailableError) as caught:
                await client.generate([number], max_tokens=900, ignore_eos=True).result()
            return caught.value.problem

        problems = await asyncio.gather(*(complete(number) for number in range(30)))
        assert all("the echo device was asked to fail" in problem for problem in problems)
        await eventually(lambda: "died" in str(server.server.service.why_not_ready()), "not ready")
        with pytest.raises(UnavailableError, match="died"):
            await client.generate([1], max_tokens=1).result()


@asynchronous
async def test_a_raw_client_reads_the_error_from_the_status_alone() -> None:
    """What a client in another language sees: a code, and one line that says it all."""
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_stream("/trtc.v1.Inference/Generate", bytes, bytes)(b"")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "prompt: is missing. Give text, token_ids or chat"


def test_the_default_configuration_binds_loopback_only() -> None:
    assert GrpcConfig().host == HttpConfig().host == "127.0.0.1"
