"""Every field that can be wrong: Ollama's error with the field named, and nothing left behind."""

from typing import Any

from tests.support.aio import asynchronous
from tests.support.http_asking import ask, limited
from tests.support.openai_sdk import ECHO
from tests.support.servers import EchoEngine, RunningServer, echo_server

CHAT, GENERATE, SHOW = "/api/chat", "/api/generate", "/api/show"
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

Bad = tuple[str, dict[str, Any]]


def chat(**fields: Any) -> Bad:
    return CHAT, {"messages": [USER], **fields}


def message(**fields: Any) -> Bad:
    return CHAT, {"messages": [USER, fields]}


def generate(**fields: Any) -> Bad:
    return GENERATE, {"prompt": "a", **fields}


def options(**fields: Any) -> Bad:
    return GENERATE, {"prompt": "a", "options": fields}


# (path, body), how its error begins
BAD: list[tuple[Bad, str]] = [
    ((CHAT, {"messages": "hello"}), "messages: expected array | null, got str"),
    ((CHAT, {"messages": ["hello"]}), "messages[0]: expected object, got str"),
    ((CHAT, {"messages": [USER] * 40}), "messages: has 40 messages"),
    (message(content="a"), "messages[1].role: is missing"),
    (message(role="king", content="a"), "messages[1].role: is 'king'"),
    (message(role="user"), "messages[1].content: is missing"),
    (message(role="user", content=5), "messages[1].content: is a int"),
    (message(role="user", content="a", images=["aGk="]), "messages[1].images: is not supported"),
    (message(role="user", content="a", audio="x"), "messages[1]: has the keys"),
    (message(role="tool", content="a", tool_name=5), "messages[1].tool_name: is a int"),
    (message(role="user", content="x" * 20_000), "messages: has 20"),
    (
        message(role="assistant", tool_calls=[{"function": {"name": 5}}]),
        "messages[1].tool_calls[0].function.name: is a int",
    ),
    (chat(tools=[{"type": "function"}]), "tools[0].name: is missing"),
    (chat(tools=[TOOL]), "tools: is not supported"),
    (chat(tools=[TOOL, TOOL]), "tools[1]: 'f' is given twice"),
    (chat(tools=[{"type": "browser"}]), "tools[0].type: 'browser' is not supported"),
    (chat(tools="f"), "tools: expected array | null, got str"),
    (chat(format="yaml"), "format: cannot be compiled: "),
    (chat(think="most"), "think: is 'most'"),
    (chat(think=5), "think: expected"),
    (chat(model=5), "model: expected str | null, got int"),
    (chat(top_logprobs=1), "top_logprobs: is given without logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs: is 21"),
    (chat(stream="yes"), "stream: expected bool | null, got str"),
    (chat(keep_alive=[]), "keep_alive: expected"),
    ((GENERATE, {"prompt": 5}), "prompt: expected str | null, got int"),
    (generate(prompt="x" * 20_000), "prompt: has 20"),
    (generate(raw=True, system="a"), "system: is given beside raw"),
    (generate(suffix="a"), "suffix: is not supported"),
    (generate(images=["aGk="]), "images: is not supported"),
    (generate(template="{{ .Prompt }}"), "template: is not supported"),
    (generate(context=[1, 2]), "context: is not supported"),
    (generate(format={"not": {}}), 'format: cannot be compiled: Unimplemented keys: ["not"]'),
    (generate(width=64), "width: is not supported"),
    (generate(options=5), "options: expected object, got int"),
    (generate(options=[]), "options: expected object, got array"),
    (options(num_predict=0), "options.num_predict: is 0"),
    (options(num_predict="9"), "options.num_predict: expected int | null, got str"),
    (options(num_predict=2**70), "options.num_predict: "),
    (options(temperature=-1), "options.temperature: is -1"),
    (options(temperature="hot"), "options.temperature: expected float | null, got str"),
    (options(top_p=0), "options.top_p: is 0"),
    (options(top_k=-2), "options.top_k: is -2"),
    (options(min_p=2), "options.min_p: is 2"),
    (options(repeat_penalty=0), "options.repeat_penalty: is 0"),
    (options(presence_penalty=3), "options.presence_penalty: is 3"),
    (options(frequency_penalty=-3), "options.frequency_penalty: is -3"),
    (options(seed=2**64), "options.seed: is 18446744073709551616"),
    (options(seed="a"), "options.seed: expected int | null, got str"),
    (options(stop=["a"] * 17), "options.stop (how many): is 17"),
    (options(stop=[1]), "options.stop[0]: expected str, got int"),
    (options(stop="x" * 600), "options.stop"),
    (options(mirostat=1), "options.mirostat: is not supported"),
    (options(repeat_last_n=64), "options.repeat_last_n: is not supported"),
    (options(typical_p=0.7), "options.typical_p: is not supported"),
    (options(tfs_z=0.5), "options.tfs_z: is not supported"),
    (options(penalize_newline=False), "options.penalize_newline: is not supported"),
    ((SHOW, {"model": 5}), "model: expected str | null, got int"),
]


async def still_serves(server: RunningServer) -> None:
    await server.idle()
    answer = await ask(server, *generate(stream=False, options={"num_predict": 2}))
    assert answer.status == 200
    assert answer.document["eval_count"] == 2


@asynchronous
async def test_every_bad_field_is_named_and_nothing_is_left() -> None:
    async with limited() as server:
        for (path, document), said in BAD:
            answer = await ask(server, path, document)
            what = (path, str(document)[:200], answer.body[:300])
            assert answer.status == 400, what
            assert answer.document["error"].startswith(said), what
            assert len(answer.document["error"]) < 1100
        await still_serves(server)


@asynchronous
async def test_an_engine_without_a_tokenizer_takes_no_text() -> None:
    async with echo_server(EchoEngine()) as server:
        for path, document in (generate(), generate(raw=True), chat()):
            answer = await ask(server, path, document)
            assert answer.status == 400
            assert "built without a tokenizer" in answer.document["error"]


@asynchronous
async def test_a_server_that_does_not_serve_says_when_to_ask_again() -> None:
    async with echo_server(ECHO) as server:
        server.server.service.models.set_ready("echo", "running its canaries")
        answer = await ask(server, *generate())
        assert answer.status == 503
        assert "running its canaries" in answer.document["error"]
        assert answer.headers["retry-after"] == "1"
