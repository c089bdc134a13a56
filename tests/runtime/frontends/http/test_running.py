"""Several prompts as one stream of outputs."""

from dataclasses import replace

import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.servers import CONFIG, EOS, EchoEngine, RunningServer, echo_server, greedy
from trtc.protos.errors import InvalidRequestError, QueueFullError
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.frontends.http.running import running
from trtc.runtime.requests.principal import LOCAL
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.service.limits import ServiceLimits

ENGINE = EchoEngine(EchoOptions(never=(EOS,)))


def request_inputs(*prompts: int, max_tokens: int = 40) -> list[RequestInput]:
    return [
        RequestInput(token_ids=(one,), max_tokens=max_tokens, sampling={"temperature": 0.0})
        for one in prompts
    ]


def num_running(server: RunningServer) -> int:
    stats = server.handle().loop.stats()
    return stats.running + stats.waiting


@asynchronous
async def test_outputs_are_told_with_the_number_of_their_prompt() -> None:
    async with echo_server(ENGINE) as server:
        told: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async with running(server.server.service, request_inputs(5, 6, 7), LOCAL) as run:
            async for arrived in run.outputs:
                for prompt, output in arrived:
                    told[prompt] += output.token_ids
        assert told == {at: greedy((5 + at,), 40, ENGINE.options) for at in range(3)}


@asynchronous
async def test_what_is_left_unread_counts_for_each_prompt() -> None:
    limits = ServiceLimits(max_unread_tokens=64)
    async with echo_server(ENGINE, config=replace(CONFIG, limits=limits)) as server:
        several = request_inputs(5, 6, 7, max_tokens=900)
        async with running(server.server.service, several, LOCAL) as run:
            await eventually(
                lambda: server.server.service.num_open == 0 and num_running(server) == 0,
                "all requests are ended",
            )
            with pytest.raises(QueueFullError, match="64 tokens unread"):
                async for _ in run.outputs:
                    pass
        await server.idle()


@asynchronous
async def test_an_input_that_is_refused_ends_those_before_it() -> None:
    async with echo_server(ENGINE) as server:
        with pytest.raises(InvalidRequestError):
            async with running(server.server.service, request_inputs(5, 6, 999_999), LOCAL):
                pass
        await server.idle()


@asynchronous
async def test_leaving_ends_all() -> None:
    async with echo_server(ENGINE) as server:
        async with running(
            server.server.service, request_inputs(5, 6, max_tokens=900), LOCAL
        ) as run:
            await anext(run.outputs)
        await server.idle()
