"""What the unmodified `openai` SDK asks and reads, against the engine in this process."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.support.aio import asynchronous, eventually
from tests.support.openai_sdk import ECHO, SLOW, sdk
from tests.support.servers import CONFIG, TOKENIZER, echo_server, greedy
from trtc.runtime.client import AsyncClient
from trtc.runtime.requests.completion import Result
from trtc.runtime.requests.principal import LOCAL
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.text.tokenizer import Tokenizer

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "def f("}]},
]
SAMPLED: Mapping[str, Any] = {"max_tokens": 12, "seed": 7, "temperature": 0.9, "top_p": 0.8}


async def over_grpc(address: str, **asked: Any) -> Result:
    """The same over trtc.v1: the oracle."""
    async with AsyncClient(address) as client:
        generation = (
            client.chat(asked.pop("messages"), **asked)
            if "messages" in asked
            else client.generate(asked.pop("prompt"), **asked)
        )
        return await generation.result()  # type: ignore[no-any-return]


@asynchronous
async def test_models_are_listed_with_their_lengths() -> None:
    async with echo_server(ECHO, names=("a", "b/c")) as server, sdk(server) as client:
        models = [one async for one in client.models.list()]
        assert [one.id for one in models] == ["a", "b/c"]
        assert models[0].model_dump()["max_model_len"] == 1024
        assert (await client.models.retrieve("b/c")).id == "b/c"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("d")
        assert caught.value.code == "model_not_found"


@asynchronous
async def test_models_are_unavailable_until_they_serve() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        server.server.service.models.set_ready("echo", "running its canaries")
        with pytest.raises(openai.InternalServerError) as caught:
            await client.models.list()
        assert caught.value.status_code == 503
        assert "running its canaries" in caught.value.message
        assert caught.value.response.headers["retry-after"] == "1"


@asynchronous
async def test_a_chat_is_answered_whole() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        expected = await over_grpc(server.address, messages=MESSAGES, **SAMPLED)
        answer = await client.chat.completions.create(model="echo", messages=MESSAGES, **SAMPLED)
        (choice,) = answer.choices
        assert choice.message.content == expected.text
        assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
        assert answer.system_fingerprint == server.handle().manifest.digest
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens == expected.usage.prompt_tokens
        assert (usage.completion_tokens, usage.total_tokens) == (12, usage.prompt_tokens + 12)
        again = await client.chat.completions.create(model="echo", messages=MESSAGES, **SAMPLED)
        assert again.choices == answer.choices and again.id != answer.id
        assert again.usage is not None and again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == 16, "a page"


@asynchronous
async def test_a_chat_is_streamed() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        expected = await over_grpc(server.address, messages=MESSAGES, **SAMPLED)
        stream = await client.chat.completions.create(
            model="echo",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            **SAMPLED,
        )
        chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
        *told, usage = chunks
        assert usage.choices == [] and usage.usage is not None
        assert usage.usage.completion_tokens == 12
        first, last = told[0].choices[0], told[-1].choices[0]
        assert (first.delta.role, first.delta.content) == ("assistant", "")
        assert (last.finish_reason, last.delta.content) == ("length", None)
        assert [one.choices[0].finish_reason for one in told[:-1]] == [None] * (len(told) - 1)
        assert "".join(one.choices[0].delta.content or "" for one in told) == expected.text
        assert len({one.id for one in chunks}) == 1


@asynchronous
async def test_cached_tokens_are_told() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        prompt = list(range(100, 200))
        for cached in (0, 96):
            answer = await client.completions.create(model="echo", prompt=prompt, max_tokens=1)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == cached


@asynchronous
async def test_n_sequences_are_drawn_for_a_chat() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        expected = await over_grpc(server.address, messages=MESSAGES, n=3, **SAMPLED)
        answer = await client.chat.completions.create(
            model="echo", messages=MESSAGES, n=3, **SAMPLED
        )
        texts = [one.text for one in expected.completions]
        assert [one.message.content for one in answer.choices] == texts
        stream = await client.chat.completions.create(
            model="echo", messages=MESSAGES, n=3, stream=True, **SAMPLED
        )
        streamed = ["", "", ""]
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_completions_take_prompts_of_every_kind(stream: bool) -> None:
    tokenizer = Tokenizer.load(TOKENIZER)
    texts = ["import os", "class A"]
    ids = [list(tokenizer.encode(text)) for text in texts]
    tokenizer.close()
    async with echo_server(ECHO) as server, sdk(server) as client:
        for prompt in (texts[0], texts, ids[0], ids):
            several = prompt in (texts, ids)
            told: list[list[int]] = [[], []]
            answer: Any = await client.completions.create(
                model="echo",
                prompt=prompt,
                max_tokens=5,
                temperature=0,
                stream=stream,
                extra_body={"return_token_ids": True},
            )
            if stream:
                async for chunk in answer:
                    (choice,) = chunk.choices
                    told[choice.index] += choice.token_ids
            else:
                for choice in answer.choices:
                    told[choice.index] += choice.token_ids
                    assert choice.prompt_token_ids == ids[choice.index]
            for at in range(1 + several):
                assert told[at] == greedy(ids[at], 5, ECHO.options)


@asynchronous
async def test_a_completion_has_sixteen_tokens_unless_it_says_otherwise() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        answer = await client.completions.create(model="echo", prompt="a")
        assert answer.usage is not None and answer.usage.completion_tokens == 16


@asynchronous
async def test_stop_strings_and_stop_tokens_end_a_sequence() -> None:
    ids = greedy((100, 200), 12, ECHO.options)
    tokenizer = Tokenizer.load(TOKENIZER)
    word = tokenizer.decode((ids[4],)).strip()
    tokenizer.close()
    assert word
    asked: Mapping[str, Any] = {"model": "echo", "prompt": [100, 200], "temperature": 0}
    async with echo_server(ECHO) as server, sdk(server) as client:
        answer = await client.completions.create(**asked, stop=[word], max_tokens=12)
        assert answer.choices[0].finish_reason == "stop"
        assert word not in answer.choices[0].text
        kept = await client.completions.create(
            **asked, stop=word, max_tokens=12, extra_body={"include_stop_str_in_output": True}
        )
        assert kept.choices[0].text == answer.choices[0].text + word
        assert kept.choices[0].model_dump()["stop_reason"] == word
        ended = await client.completions.create(
            **asked, max_tokens=12, extra_body={"stop_token_ids": [ids[4]]}
        )
        assert ended.choices[0].model_dump()["stop_reason"] == ids[4]
        assert ended.usage is not None and ended.usage.completion_tokens == 5


@asynchronous
async def test_log_probabilities_are_those_of_trtc_v1() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        expected = await over_grpc(server.address, messages=MESSAGES, logprobs=2, **SAMPLED)
        asked: Mapping[str, Any] = {"model": "echo", "messages": MESSAGES, **SAMPLED}
        answer = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        for told, own in zip(logprobs.content, expected.logprobs, strict=True):
            assert told.logprob == pytest.approx(own.logprob, abs=1e-6)
            assert bytes(told.bytes or ()) == own.utf8
            assert [bytes(one.bytes or ()) for one in told.top_logprobs] == list(own.top_utf8)
        stream = await client.chat.completions.create(
            **asked, logprobs=True, top_logprobs=2, stream=True
        )
        streamed: list[Any] = []
        async for chunk in stream:
            if chunk.choices[0].logprobs is not None:
                streamed += chunk.choices[0].logprobs.content or []
        assert [one.model_dump() for one in streamed] == [
            one.model_dump() for one in logprobs.content
        ]
        named = await client.chat.completions.create(
            **asked, logprobs=True, extra_body={"return_tokens_as_token_ids": True}
        )
        logprobs = named.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [one.token for one in logprobs.content] == [
            f"token_id:{token}" for token in expected.token_ids
        ]


@asynchronous
async def test_a_prompt_is_echoed_with_its_log_probabilities() -> None:
    prompt = "import os"
    async with echo_server(ECHO) as server, sdk(server) as client:
        expected = await over_grpc(
            server.address, prompt=prompt, max_tokens=1, temperature=0, prompt_logprobs=1
        )
        asked: Mapping[str, Any] = {"model": "echo", "prompt": prompt, "temperature": 0}
        plain = await client.completions.create(**asked, echo=True, max_tokens=1)
        assert plain.choices[0].text == prompt + expected.text
        # What lm-eval asks to score a text.
        for max_tokens, drawn in ((0, ()), (1, expected.token_ids)):
            scored = await client.completions.create(
                **asked, echo=True, logprobs=1, max_tokens=max_tokens
            )
            choice = scored.choices[0]
            assert choice.text == prompt + (expected.text if drawn else "")
            assert choice.logprobs is not None
            values = choice.logprobs.token_logprobs
            own = [one.logprob for one in expected.prompt_logprobs]
            assert values is not None and values[0] is None
            assert values[1 : 1 + len(own)] == pytest.approx(own, abs=1e-6)
            assert len(values) == 1 + len(own) + len(drawn)
            tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
            assert tokens is not None and offsets is not None
            for token, offset in zip(tokens, offsets, strict=True):
                assert choice.text[offset:].startswith(token)
            assert scored.usage is not None
            assert scored.usage.completion_tokens == len(drawn)
            stream = await client.completions.create(
                **asked, echo=True, logprobs=1, max_tokens=max_tokens, stream=True
            )
            streamed: list[float | None] = []
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].text
                told = chunk.choices[0].logprobs
                streamed += (told.token_logprobs or []) if told is not None else []
            assert (text, streamed) == (choice.text, values)


@asynchronous
async def test_prompt_log_probabilities_are_told_as_vllm_tells_them() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        answer = await client.chat.completions.create(
            model="echo", messages=MESSAGES, max_tokens=1, extra_body={"prompt_logprobs": 2}
        )
        first, *others = answer.model_dump()["prompt_logprobs"]
        assert first is None
        assert answer.usage is not None and len(others) == answer.usage.prompt_tokens - 1
        assert all(2 <= len(one) <= 3 for one in others)


@asynchronous
async def test_usage_of_every_chunk() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        options: Any = {"continuous_usage_stats": True}
        stream = await client.completions.create(
            model="echo", prompt=[100, 200], max_tokens=4, stream=True, stream_options=options
        )
        usages = [chunk.usage async for chunk in stream]
        assert [one.prompt_tokens for one in usages if one] == [2] * len(usages)
        assert usages[-1] is not None and usages[-1].completion_tokens == 4


@asynchronous
async def test_biases_and_vllms_own_fields_hold() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        asked: Mapping[str, Any] = {"model": "echo", "prompt": [100, 200], "max_tokens": 8}
        biased = await client.completions.create(
            **asked, logit_bias={"321": 100}, extra_body={"return_token_ids": True}
        )
        assert biased.choices[0].model_dump()["token_ids"] == [321] * 8
        greedily = await client.completions.create(
            **asked,
            seed=-5,
            extra_body={
                "top_k": 1,
                "min_p": 0.5,
                "repetition_penalty": 1.0,
                "ignore_eos": True,
                "min_tokens": 8,
                "priority": 3,
                "cache_salt": "salt",
                "return_token_ids": True,
            },
        )
        told = greedily.choices[0].model_dump()["token_ids"]
        assert told == greedy((100, 200), 8, ECHO.options)
        everything = await client.completions.create(**asked, extra_body={"top_k": -1})
        assert everything.choices[0].finish_reason == "length"


@asynchronous
async def test_a_prompt_is_cut_to_its_last_tokens() -> None:
    """vLLM's truncate_prompt_tokens."""
    async with echo_server(ECHO) as server, sdk(server) as client:

        async def prompt_ids(prompt: Any, most: int, **fields: Any) -> list[int]:
            answer = await client.completions.create(
                model="echo",
                prompt=prompt,
                extra_body={"truncate_prompt_tokens": most, "return_token_ids": True},
                **fields,
            )
            assert answer.usage is not None
            (choice,) = answer.choices
            ids: list[int] = choice.model_dump()["prompt_token_ids"]
            assert answer.usage.prompt_tokens == len(ids)
            if fields.get("echo"):
                text = await server.server.service.detokenize("echo", ids, True, LOCAL)
                assert choice.text == text
            return ids

        ids = await prompt_ids("class Stack:\n    def push(self", 1000)
        assert len(ids) > 5
        assert await prompt_ids("class Stack:\n    def push(self", 5) == ids[-5:]
        assert await prompt_ids(ids, 3, echo=True, max_tokens=0) == ids[-3:]
        most = server.handle().loop.bounds.max_context
        assert await prompt_ids([7] * (most + 500), -1, max_tokens=9) == [7] * (most - 9)
        assert len(await prompt_ids([7] * (most + 500), -1)) == most - 16, "the default"
        chat = await client.chat.completions.create(
            model="echo",
            messages=MESSAGES,
            max_tokens=1,
            extra_body={"truncate_prompt_tokens": 4},
        )
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == 4


@asynchronous
async def test_what_is_ignored_is_named_in_a_header() -> None:
    async with echo_server(ECHO) as server, sdk(server) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="echo",
            messages=MESSAGES,
            max_tokens=1,
            user="somebody",
            extra_body={"mystery\r\nx: y": 1, "tools": [], "response_format": {"type": "text"}},
        )
        assert raw.headers["x-trtc-ignored"] == "user, ?"
        assert "x" not in raw.headers
        assert (await client.completions.create(model="echo", prompt="a"))._request_id


@asynchronous
async def test_answers_go_back_as_messages() -> None:
    """With all the fields that the SDK's own objects have."""
    async with echo_server(ECHO) as server, sdk(server) as client:
        first = await client.chat.completions.create(model="echo", messages=MESSAGES, max_tokens=3)
        messages = [
            *MESSAGES,
            first.choices[0].message,
            first.choices[0].message.model_dump(),
            {"role": "user", "content": "Go on."},
        ]
        second = await client.chat.completions.create(model="echo", messages=messages, max_tokens=3)
        assert second.choices[0].finish_reason == "length"


@asynchronous
async def test_a_full_server_says_when_to_ask_again() -> None:
    config = replace(CONFIG, limits=ServiceLimits(max_streams=1))
    async with echo_server(SLOW, config=config) as server, sdk(server) as client:
        stream = await client.completions.create(
            model="echo", prompt="a", max_tokens=900, stream=True
        )
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="echo", prompt="a")
        assert caught.value.response.headers["retry-after"] == "1"
        await stream.close()
        await server.idle()


@asynchronous
async def test_a_client_that_closes_its_stream_ends_its_request() -> None:
    async with echo_server(SLOW) as server, sdk(server) as client:
        stream = await client.chat.completions.create(
            model="echo", messages=MESSAGES, max_tokens=900, stream=True
        )
        await eventually(lambda: server.handle().loop.stats().running == 1, "it runs")
        await stream.close()
        await server.idle(timeout=5)


@asynchronous
async def test_a_client_that_gives_up_on_a_whole_answer_ends_its_request() -> None:
    async with echo_server(SLOW) as server, sdk(server) as client:
        asking = asyncio.create_task(
            client.completions.create(model="echo", prompt=["a", "b"], max_tokens=900)
        )
        await eventually(lambda: server.handle().loop.stats().running == 2, "both run")
        asking.cancel()
        await server.idle(timeout=5)
        with pytest.raises(asyncio.CancelledError):
            await asking


@asynchronous
async def test_an_error_in_a_stream_is_raised_by_the_sdk() -> None:
    async with echo_server(SLOW) as server, sdk(server) as client:
        stream = await client.chat.completions.create(
            model="echo", messages=MESSAGES, max_tokens=900, stream=True
        )
        whole = asyncio.create_task(
            client.completions.create(model="echo", prompt=["a", "b"], max_tokens=900)
        )
        await eventually(lambda: server.handle().loop.stats().running == 3, "all run")
        await asyncio.to_thread(server.handle().loop.stop)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code in ("service_unavailable", "cancelled")
        with pytest.raises(openai.APIStatusError):
            await whole
