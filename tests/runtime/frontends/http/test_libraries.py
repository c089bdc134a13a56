"""Libraries that applications are written with need no change: answers, streams, usage, errors,
retries, and what is left of them when they leave."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.libraries import LIBRARIES, MESSAGES, Answer, Question
from tests.support.library_process import Libraries
from tests.support.openai_sdk import ECHO, SLOWER
from tests.support.servers import CONFIG, RunningServer, echo_server
from trtc.runtime.client import AsyncClient
from trtc.runtime.requests.completion import Result
from trtc.runtime.service.limits import ServiceLimits


async def over_grpc(server: RunningServer, **options: Any) -> Result:
    """The same over trtc.v1: the oracle."""
    async with AsyncClient(server.address) as client:
        generation = client.chat(MESSAGES, temperature=0.0, **options)
        return await generation.result()  # type: ignore[no-any-return]


async def question(server: RunningServer, name: str, num_tokens: int) -> Question:
    """One whose answer has so many tokens."""
    if "openai-agents" not in name:
        return Question(server.http_port, num_tokens)
    stop = (await over_grpc(server, max_tokens=num_tokens)).token_ids[-1]
    return Question(server.http_port, 900, stop_token_ids=[stop])


@pytest.mark.parametrize("name", LIBRARIES)
@asynchronous
async def test_answers_are_those_over_grpc(name: str, process: Libraries) -> None:
    async with echo_server(ECHO) as server:
        asked = await question(server, name, 9)
        options = {"max_tokens": asked.max_tokens, "stop_token_ids": asked.stop_token_ids}
        result = await over_grpc(server, **options)
        expected = Answer(result.text, result.usage.prompt_tokens, result.usage.completion_tokens)
        for how in ("whole", "streamed"):
            assert await process.ask(name, how, *[asked] * 3) == [expected] * 3


@pytest.mark.parametrize("name", [name for name, one in LIBRARIES.items() if one.left])
@asynchronous
async def test_a_stream_that_is_left_ends_its_request(name: str, process: Libraries) -> None:
    async with echo_server(SLOWER) as server:
        (answer,) = await process.ask(name, "left", Question(server.http_port, 900))
        assert answer.text, answer.message
        await server.idle(timeout=20)


ERRORS = {
    # What each raises for a prompt that is too long, and for a model that is not there.
    "langchain-openai": ("BadRequestError", "NotFoundError"),
    "langchain-openai, responses": ("BadRequestError", "NotFoundError"),
    "langchain-anthropic": ("BadRequestError", "NotFoundError"),
    "langchain-ollama": ("ResponseError", "ResponseError"),
    "LiteLLM, OpenAI": ("ContextWindowExceededError", "NotFoundError"),
    "LiteLLM, vLLM": ("ContextWindowExceededError", "NotFoundError"),
    "LiteLLM, Anthropic": ("BadRequestError", "NotFoundError"),
    "LiteLLM, Ollama": ("APIError", "APIError"),
    "openai-agents, chat completions": ("BadRequestError", "NotFoundError"),
    "openai-agents, responses": ("BadRequestError", "NotFoundError"),
}


@pytest.mark.parametrize("name", LIBRARIES)
@asynchronous
async def test_errors_are_their_own(name: str, process: Libraries) -> None:
    too_long, unknown = ERRORS[name]
    async with echo_server(ECHO) as server:
        for how in ("whole", "streamed"):
            long, other = await process.ask(
                name, how, Question(server.http_port, 4096), Question(server.http_port, 9, 0, "no")
            )
            assert too_long in long.errors and "1024" in long.message, long
            assert unknown in other.errors and "no engine is called" in other.message, other


RETRYING = [
    name for name in LIBRARIES if "Ollama" not in name and "ollama" not in name
]  # its client never asks again


@pytest.mark.parametrize("name", RETRYING)
@asynchronous
async def test_a_full_server_is_asked_again(name: str, process: Libraries) -> None:
    limits = ServiceLimits(max_streams=1)
    async with (
        echo_server(SLOWER, config=replace(CONFIG, limits=limits)) as server,
        AsyncClient(server.address) as client,
    ):
        asked = await question(server, name, 2)
        holding = client.generate([1], max_tokens=900)
        await anext(holding)
        (refused,) = await process.ask(name, "whole", asked)
        assert "RateLimitError" in refused.errors, refused
        asking = asyncio.create_task(process.ask(name, "whole", replace(asked, retries=3)))
        await eventually(lambda: server.num_refused() >= 2, "it is refused, too", 20)
        holding.cancel()
        (answer,) = await asking
        assert answer.completion_tokens == 2, answer
        await server.idle()
