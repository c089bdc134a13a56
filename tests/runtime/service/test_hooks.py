"""Hooks in a real server: what they change, and that a fault is one request's alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from tests.support.aio import asynchronous
from tests.support.dialects import DIALECTS, Case
from tests.support.openai_sdk import ECHO, SLOW, sdk
from tests.support.servers import CONFIG, TOKENIZER, EchoEngine, RunningServer, echo_server, greedy
from trtc.protos.errors import ForbiddenError, HookError, InvalidRequestError, RequestError
from trtc.runtime.client import AsyncClient
from trtc.runtime.hooks.config import HooksConfig
from trtc.runtime.hooks.contract import METHODS
from trtc.runtime.requests.request import FinishReason
from trtc.runtime.service.access import AccessConfig
from trtc.runtime.service.api_keys import ApiKey, KeyFile, Tenant, hash_of

IDS = (5, 17, 9)
TEXT = "import os\n"


@asynccontextmanager
async def hooked(
    name: str, engine: EchoEngine = ECHO, timeout_s: float = 5.0, **config: Any
) -> AsyncIterator[RunningServer]:
    hooks = HooksConfig(f"tests.support.hook_sets:{name}", timeout_s, num_processes=2)
    async with echo_server(engine, config=replace(CONFIG, hooks=hooks, **config)) as server:
        yield server
        await server.idle()
        assert server.server.service.num_open == 0


async def generated(client: AsyncClient, request_id: str, **options: Any) -> tuple[int, ...]:
    asked = {"max_tokens": 8, "temperature": 0.0, "request_id": request_id, **options}
    result = await client.generate(list(IDS), **asked).result()
    return result.completions[0].token_ids


@asynchronous
async def test_hooks_that_change_nothing_change_no_token() -> None:
    """By every way in, alone and beside others."""
    chat = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "def f("}]},
    )
    likeliest = {"max_tokens": 6, "temperature": 0.0}
    cases = {
        "ids": Case(IDS, [greedy(IDS, 6, ECHO.options)], likeliest),
        "text": Case(TEXT, [[1559, 2212, 1682, 3689, 46, 3170]], likeliest),
        "chat": Case(chat, [[3671, 3668, 1859, 3165, 721, 1969]], likeliest),
        "sampled": Case(IDS, [[3907, 1628, 32, 1526, 1156, 1438]], {"max_tokens": 6, "seed": 7}),
        "several": Case(
            IDS,
            [[3670, 1633, 2415, 3055], [1258, 2720, 2860, 4034], [2127, 669, 3558, 1409]],
            {"max_tokens": 4, "n": 3, "seed": 11},
        ),
    }
    async with hooked("Nothing") as server:
        for name, ask in DIALECTS.items():
            told = await asyncio.gather(*(ask(server, case) for case in cases.values()))
            for case, tokens in zip(cases.values(), told, strict=True):
                assert tokens in (None, case.expected), name


@asynchronous
async def test_a_hook_that_fails_fails_its_request_alone() -> None:
    """Each way to fail in each hook, all at once, beside requests that go on."""
    faults = {"raise": HookError, "exit": HookError, "hang": HookError, "refuse": ForbiddenError}
    async with hooked("Told", timeout_s=1.0) as server, AsyncClient(server.address) as client:
        names = [f"{fault}-{method}" for fault in faults for method in METHODS]
        wrong = [asyncio.create_task(generated(client, name)) for name in names]
        right = [asyncio.create_task(generated(client, f"right{at}")) for at in range(8)]
        told = await asyncio.gather(*wrong, return_exceptions=True)
        for name, error in zip(names, told, strict=True):
            fault, _, method = name.partition("-")
            assert type(error) is faults[fault], name
            assert fault == "refuse" or method in str(error)
        expected = tuple(greedy(IDS, 8, ECHO.options))
        assert await asyncio.gather(*right) == [expected] * 8
        assert await generated(client, "after") == expected


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_openai_s_clients_get_its_errors(stream: bool) -> None:
    async def ask(client: openai.AsyncOpenAI, says: str) -> str:
        answer: Any = await client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": says}],
            max_tokens=6,
            temperature=0,
            stream=stream,
        )
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join([one.choices[0].delta.content or "" async for one in answer])

    async with hooked("Told", timeout_s=1.0) as server, sdk(server) as client:
        expected = await ask(client, "right")
        for says in ("raise-on_output", "hang-on_output", "exit-logits_processor"):
            wrong, right = ask(client, says), ask(client, "right")
            error, text = await asyncio.gather(wrong, right, return_exceptions=True)
            assert isinstance(error, openai.APIError), says
            assert "the server's hook" in str(error)
            assert "secret" not in str(error)
            assert text == expected
        with pytest.raises(openai.PermissionDeniedError, match="not on a Monday"):
            await ask(client, "refuse-on_request")


@asynchronous
async def test_a_slow_hook_changes_no_token() -> None:
    async with hooked("Told") as server, AsyncClient(server.address) as client:
        slow = asyncio.create_task(generated(client, "slow-on_output", max_tokens=40))
        expected = tuple(greedy(IDS, 40, ECHO.options))
        for _ in range(5):
            assert await generated(client, "quick", max_tokens=40) == expected
        assert await slow == expected


@asynchronous
async def test_parameters_are_those_that_a_hook_gives() -> None:
    async with hooked("Editor") as server, AsyncClient(server.address) as client:

        async def ask(text: str) -> list[int]:
            result = await client.generate(text, max_tokens=8, seed=3).result()
            return list(result.completions[0].token_ids)

        assert len(await ask("plain")) == 8
        assert len(await ask("short")) == 3
        assert await ask("likeliest") == [9] * 8
        with pytest.raises(HookError, match="gave a wrong sampling parameter: 'temprature'"):
            await ask("odd")
        with pytest.raises(InvalidRequestError, match=r"^temperature: is -1"):
            await ask("beyond")


@asynchronous
async def test_a_prompt_is_the_one_that_a_hook_gives() -> None:
    async with hooked("Editor") as server, AsyncClient(server.address) as client:
        asked = client.generate(
            "a text that is longer", max_tokens=8, temperature=0.0, request_id="prompt"
        )
        result = await asked.result()
        assert list(result.completions[0].token_ids) == greedy(IDS, 8, ECHO.options)
        assert result.usage.prompt_tokens == len(IDS)


@asynchronous
async def test_text_in_place_of_another_comes_without_its_tokens() -> None:
    async with hooked("Editor") as server, AsyncClient(server.address) as client, sdk(server) as ai:
        options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "logprobs": 2}
        plain = await client.generate(TEXT, **options).result()
        redacted = await client.generate(TEXT, request_id="redact", **options).result()
        (before,), (after,) = plain.completions, redacted.completions
        assert after.text == "*" * len(before.text)
        assert (after.token_ids, after.logprobs) == ((), ())
        assert redacted.usage.completion_tokens == 8
        chunks = [
            one.choices[0]
            async for one in await ai.completions.create(
                model="echo", prompt="redact", stream=True, **options
            )
        ]
        assert set("".join(one.text for one in chunks)) == {"*"}
        assert not any(one.logprobs and one.logprobs.tokens for one in chunks)
        assert chunks[-1].finish_reason == "length"


@asynchronous
async def test_a_hook_can_end_a_sequence_and_with_the_last_one_the_request() -> None:
    async with hooked("Editor", SLOW) as server, AsyncClient(server.address) as client:
        asked: dict[str, Any] = {"max_tokens": 500, "seed": 1}
        one = await client.generate(list(IDS), request_id="stop", **asked).result()
        (completion,) = one.completions
        assert (completion.text, completion.finish_reason) == ("[stopped]", FinishReason.STOP)
        assert one.usage.completion_tokens < 100, "the engine went on"
        asked["max_tokens"] = 12
        two = await client.generate(list(IDS), request_id="stop2", n=2, **asked).result()
        first, second = two.completions
        assert (first.text, first.finish_reason) == ("[stopped]", FinishReason.STOP)
        assert second.finish_reason is FinishReason.LENGTH
        assert len(second.token_ids) == 12
        async with sdk(server) as ai:
            answer = await ai.completions.create(model="echo", prompt="stop", max_tokens=500)
        assert answer.choices[0].text == "[stopped]"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.completion_tokens < 100


@asynchronous
async def test_tokens_are_drawn_as_a_logits_processor_says() -> None:
    async with hooked("Chooser") as server, AsyncClient(server.address) as client:
        assert await generated(client, "r") == (40, 41, 42, 43, 40, 41, 42, 43)
        several = await client.generate(list(IDS), max_tokens=8, n=3, temperature=2.0).result()
        assert {one.token_ids for one in several.completions} == {(40, 41, 42, 43) * 2}
        with pytest.raises(HookError, match="allows no token"):
            await generated(client, "none")
        with pytest.raises(HookError, match="a bias beyond 100"):
            await generated(client, "large")


@asynchronous
async def test_a_hook_is_told_the_tenant(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    acme = Tenant(keys=(ApiKey("key", hash_of("secret")),))
    keys.write_bytes(msgspec.json.encode(KeyFile(tenants={"acme": acme})))
    async with (
        hooked("Tenants", access=AccessConfig(keys)) as server,
        AsyncClient(server.address, api_key="secret") as client,
    ):
        with pytest.raises(ForbiddenError, match=r"^acme asks echo$"):
            await generated(client, "r")


@asynchronous
async def test_a_client_that_leaves_during_a_call_frees_its_place() -> None:
    async with hooked("Told", timeout_s=1.0) as server, AsyncClient(server.address) as client:
        for method in METHODS:
            leaving = asyncio.create_task(generated(client, f"hang-{method}"))
            await asyncio.sleep(0.1)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        while server.server.service.num_open:
            await asyncio.sleep(0.01)
        assert await generated(client, "r") == tuple(greedy(IDS, 8, ECHO.options))


@asynchronous
async def test_engines_that_cannot_wait_for_a_logits_processor_refuse_it_by_name() -> None:
    states = replace(ECHO, options=replace(ECHO.options, windows=(None, 0)))
    with pytest.raises(RequestError, match=r"^--hooks: logits_processor is not possible: .* recur"):
        async with hooked("Chooser", states):
            pass
    async with hooked("Editor", states) as server, AsyncClient(server.address) as client:
        assert len(await generated(client, "r")) == 8


@asynchronous
async def test_an_engine_without_a_tokenizer_has_hooks_too() -> None:
    plain = replace(ECHO, tokenizer=None)
    assert TOKENIZER.exists()
    async with hooked("Nothing", plain) as server, AsyncClient(server.address) as client:
        assert await generated(client, "r") == tuple(greedy(IDS, 8, ECHO.options))


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "hooks.md").read_text()
    (tmp_path / "guard.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))

    @asynchronous
    async def ask() -> None:
        config = replace(CONFIG, hooks=HooksConfig("guard:Guard"))
        async with (
            echo_server(ECHO, config=config) as server,
            AsyncClient(server.address) as client,
        ):
            with pytest.raises(ForbiddenError, match="anonymous clients may not ask this server"):
                await generated(client, "r")

    ask()
