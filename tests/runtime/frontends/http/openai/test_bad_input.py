"""Every field that can be wrong: OpenAI's error, its param, and nothing left behind."""

from typing import Any

from tests.support.aio import asynchronous
from tests.support.http_asking import ask, limited
from tests.support.openai_sdk import ECHO
from tests.support.servers import EchoEngine, RunningServer, echo_server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [USER], **fields}


def message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [USER, fields]}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": [1, 2, 3], **fields}


def tokenize(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/tokenize", fields


def detokenize(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/detokenize", fields


# (path, body), the param of the error, what its message must say
BAD: list[tuple[tuple[str, dict[str, Any]], str | None, str]] = [
    ((CHAT, {}), "messages", "is missing"),
    ((CHAT, {"messages": []}), "messages", "has no messages"),
    ((CHAT, {"messages": "hello"}), "messages", "expected array | null, got str"),
    ((CHAT, {"messages": ["hello"]}), "messages[0]", "expected object, got str"),
    ((CHAT, {"messages": [USER] * 40}), "messages", "has 40 messages"),
    (message(content="a"), "messages[1].role", "is missing"),
    (message(role="king", content="a"), "messages[1].role", "is 'king'"),
    (message(role=["user"], content="a"), "messages[1].role", "is \"['user']\""),
    (message(role="user"), "messages[1].content", "is missing"),
    (message(role="user", content=5), "messages[1].content", "is a int"),
    (message(role="user", content=[5]), "messages[1].content[0]", "is a int"),
    (
        message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[1].content[0].type",
        "'image_url' is not supported",
    ),
    (
        message(role="user", content=[{"type": "text", "text": 5}]),
        "messages[1].content[0].text",
        "",
    ),
    (message(role="user", content="a", audio={"id": "x"}), "messages[1]", "audio"),
    (message(role="user", content="x" * 20_000), "messages", "has 20"),
    (
        message(role="user", content=[{"type": "text", "text": ""}] * 257),
        "messages[1].content",
        "has 257 items",
    ),
    (
        message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
        "messages[1].tool_calls[0].function.arguments",
        "is not JSON",
    ),
    (tokenize(), "prompt", "is missing"),
    (tokenize(prompt="a", messages=[USER]), "prompt", "is given beside messages"),
    (tokenize(prompt=["a"]), "prompt", "got array"),
    (tokenize(prompt="x" * 20_000), "prompt", "has 20000 bytes"),
    (tokenize(prompt="a", return_token_strs=True), "return_token_strs", "is not supported"),
    (tokenize(prompt="a", model="other"), "model", "no engine is called 'other'"),
    (tokenize(messages=[]), "messages", "has no messages"),
    (tokenize(messages=[{"role": "king"}]), "messages[0].role", "is 'king'"),
    (tokenize(messages=[USER], tools=[{}]), "tools[0].name", "is missing"),
    (detokenize(), "tokens", "is missing"),
    (detokenize(tokens="a"), "tokens", "got str"),
    (detokenize(tokens=[1, "a"]), "tokens[1]", "got str"),
    (detokenize(tokens=[4096]), "tokens[0]", "4096 is not a token"),
    (detokenize(tokens=[1, -1]), "tokens[1]", "-1 is not a token"),
    (detokenize(tokens=[2**70]), "tokens[0]", "is not a token"),
    ((COMPLETIONS, {}), "prompt", "is missing"),
    ((COMPLETIONS, {"prompt": ""}), "prompt", "has no tokens"),
    ((COMPLETIONS, {"prompt": []}), "prompt", "has no tokens"),
    ((COMPLETIONS, {"prompt": 5}), "prompt", "got int"),
    ((COMPLETIONS, {"prompt": ["a", 5]}), "prompt[1]", "is a int"),
    ((COMPLETIONS, {"prompt": [1, "a"]}), "prompt[1]", "is a str"),
    ((COMPLETIONS, {"prompt": [1, 1.5]}), "prompt[1]", "is a float"),
    ((COMPLETIONS, {"prompt": [True]}), "prompt[0]", "is a bool"),
    ((COMPLETIONS, {"prompt": [[1], "a"]}), "prompt[1]", "is a str"),
    ((COMPLETIONS, {"prompt": [[1], []]}), "prompt[1]", "has no tokens"),
    ((COMPLETIONS, {"prompt": [-1]}), "prompt", "token id -1"),
    ((COMPLETIONS, {"prompt": [4096]}), "prompt", "token id 4096"),
    ((COMPLETIONS, {"prompt": [2**70]}), "prompt", "token id"),
    ((COMPLETIONS, {"prompt": ["a"] * 257}), "prompt", "has 257 prompts"),
    (completion(model="other"), "model", "no engine is called 'other'"),
    (completion(model=5), "model", "got int"),
    (completion(max_tokens=-1), "max_tokens", "is -1"),
    (completion(max_tokens=0), "max_tokens", "is 0"),
    (completion(max_tokens="9"), "max_tokens", "got str"),
    (completion(max_tokens=2**70), "max_tokens", "maximum context length"),
    (chat(max_tokens=4096), "max_tokens", "maximum context length"),
    (chat(max_completion_tokens=4096), "max_completion_tokens", "maximum context length"),
    (completion(n=0), "n", "is 0"),
    (completion(n=1000), "n", "is 1000"),
    (completion(n=2, temperature=0), "n", "at temperature 0"),
    (completion(best_of=2), "best_of", "is not supported"),
    (completion(temperature=-1), "temperature", "is -1"),
    (completion(temperature=1e300), "temperature", "is 1e+300"),
    (completion(temperature="hot"), "temperature", "got str"),
    (completion(top_p=0), "top_p", "is 0"),
    (completion(top_p=1.5), "top_p", "is 1.5"),
    (completion(top_k=-2), "top_k", "is -2"),
    (completion(top_k=1.5), "top_k", "got float"),
    (completion(min_p=2), "min_p", "is 2"),
    (completion(repetition_penalty=0), "repetition_penalty", "is 0"),
    (completion(presence_penalty=3), "presence_penalty", "is 3"),
    (completion(frequency_penalty=-3), "frequency_penalty", "is -3"),
    (completion(logit_bias={"4096": 1}), "logit_bias", "token id 4096"),
    (completion(logit_bias={"a": 1}), "logit_bias", "expected int, got str"),
    (completion(logit_bias={"1": 101}), "logit_bias", "is 101"),
    (completion(logit_bias=[1]), "logit_bias", "got array"),
    (completion(seed=2**64), "seed", "is 18446744073709551616"),
    (completion(seed=-(2**63) - 1), "seed", "is -9223372036854775809"),
    (completion(stop=["a"] * 17), "stop", "is 17"),
    (completion(stop=""), "stop", "is 0"),
    (completion(stop=[1]), "stop[0]", "got int"),
    (completion(stop="x" * 600), "stop", "is 600"),
    (completion(stop_token_ids=[4096]), "stop_token_ids", "token id 4096"),
    (completion(stop_token_ids=[1] * 300), "stop_token_ids", "is 300"),
    (completion(min_tokens=17), "min_tokens", "is 17"),
    (completion(truncate_prompt_tokens=0), "truncate_prompt_tokens", "is 0"),
    (completion(truncate_prompt_tokens=-2), "truncate_prompt_tokens", "is -2"),
    (completion(truncate_prompt_tokens=2**70), "truncate_prompt_tokens", "is 11805"),
    (chat(truncate_prompt_tokens="5"), "truncate_prompt_tokens", "got str"),
    (completion(logprobs=21), "logprobs", "is 21"),
    (completion(logprobs=True), "logprobs", "got bool"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "is 21"),
    (chat(logprobs=5), "logprobs", "got int"),
    (chat(top_logprobs=1), "top_logprobs", "given without logprobs"),
    (completion(prompt_logprobs=21), "prompt_logprobs", "is 21"),
    (completion(prompt_logprobs=1, stream=True), "prompt_logprobs", "not available in streams"),
    (completion(stream="yes"), "stream", "got str"),
    (completion(stream_options={"include_usage": True}), "stream_options", "without stream"),
    (completion(stream=True, stream_options=5), "stream_options", "got int"),
    (completion(priority=-1), "priority", "grants at most 0"),
    (completion(priority=2**40), "priority", "is -1099511627776"),
    (completion(cache_salt="x" * 300), "cache_salt", "has 300 bytes"),
    (completion(suffix="a"), "suffix", "is not supported"),
    (chat(tools=[TOOL]), "tools", "is not supported"),
    (chat(tools=[{"type": "function"}]), "tools[0].name", "is missing"),
    (chat(tools=[{"function": 5}]), "tools[0].function", "is a int"),
    (chat(tools=[{"function": {"name": "a b"}}]), "tools[0].function.name", "is 'a b'"),
    (chat(tools=[{"name": "f", "parameters": []}]), "tools[0].parameters", "is a list"),
    (chat(tools=[{"name": "f", "description": 5}]), "tools[0].description", "is a int"),
    (chat(tools=[{"name": "f", "strict": "yes"}]), "tools[0].strict", "is a str"),
    (chat(tools=[TOOL, TOOL]), "tools[1]", "'f' is given twice"),
    (chat(tools=[{"name": f"f{n}"} for n in range(513)]), "tools", "has 513 tools"),
    (chat(tools=5), "tools", "expected array"),
    (chat(tool_choice="required"), "tool_choice", "is given without tools"),
    (chat(tools=[TOOL], tool_choice="any"), "tool_choice", "is 'any'"),
    (chat(tools=[TOOL], tool_choice={}), "tool_choice", "has no type"),
    (chat(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice", "names no function"),
    (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice",
        "names 'g', which is not among the tools",
    ),
    (
        chat(tools=[TOOL], tool_choice={"type": "allowed_tools", "tools": []}),
        "tool_choice.tools",
        "is no list of tools",
    ),
    (
        chat(tools=[TOOL], tool_choice={"type": "allowed_tools", "mode": "x", "tools": [TOOL]}),
        "tool_choice.mode",
        "is 'x'",
    ),
    (
        chat(tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": 5}),
        "tool_choice.allowed_tools",
        "is a int",
    ),
    (
        chat(tools=[TOOL], tool_choice={"type": "allowed_tools", "tools": [TOOL, {}]}),
        "tool_choice.tools[1]",
        "names no function",
    ),
    (chat(parallel_tool_calls=5), "parallel_tool_calls", "expected bool"),
    (chat(reasoning_effort="most"), "reasoning_effort", "is 'most'"),
    (chat(reasoning_effort="low", enable_thinking=False), "reasoning_effort", "is 'low' beside"),
    (chat(thinking_token_budget=5), "thinking_token_budget", "is not supported"),
    (chat(functions=[{"name": "f"}]), "functions", "is not supported"),
    (chat(response_format={"type": "grammar"}), "response_format.type", "is 'grammar'"),
    (
        chat(response_format={"type": "json_schema"}),
        "response_format.json_schema.schema",
        "is missing",
    ),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
        "response_format.json_schema.schema",
        'Unimplemented keys: ["not"]',
    ),
    (chat(modalities=["text", "audio"]), "modalities", "is not supported"),
    (chat(structured_outputs={"json": 5}), "structured_outputs.json", "a JSON object"),
    (
        chat(structured_outputs={"structural_tag": "{}"}),
        "structured_outputs.structural_tag",
        "missing required field `format`",
    ),
    (
        chat(response_format={"type": "structural_tag", "format": {"type": "any_texts"}}),
        "response_format",
        "Invalid value 'any_texts' - at `$.format.type`",
    ),
    (
        chat(response_format={"type": "structural_tag", "structures": [], "triggers": ["<"]}),
        "response_format",
        "length >= 1 - at `$.structures`",
    ),
    (completion(guided_regex="("), "guided_regex", "unclosed group"),
    (completion(guided_regex="a", guided_choice=["b"]), "guided_choice", "beside guided_regex"),
    (completion(guided_regex="a", min_tokens=1), "min_tokens", "given beside guided_regex"),
    (completion(guided_choice=["a", ""]), "guided_choice", "an empty text"),
    (completion(skip_special_tokens=False), "skip_special_tokens", "is not supported"),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "set by the renderer"),
    (chat(documents=["a"]), "documents[0]", "got str"),
    (
        chat(continue_final_message=True, add_generation_prompt=True),
        "continue_final_message",
        "is given beside",
    ),
]


async def still_serves(server: RunningServer) -> None:
    await server.idle()
    answer = await ask(server, *completion(max_tokens=2))
    assert answer.status == 200
    assert answer.document["usage"]["completion_tokens"] == 2


@asynchronous
async def test_every_bad_field_is_named_and_nothing_is_left() -> None:
    async with limited() as server:
        for (path, document), param, said in BAD:
            answer = await ask(server, path, document)
            what = (path, str(document)[:200], answer.body[:300])
            assert answer.status == (
                404 if "model" in document and param == "model" and "engine" in said else 400
            ), what
            error = answer.error
            assert error["param"] == param, what
            assert said in error["message"], what
            assert error["type"] == "invalid_request_error"
            assert len(error["message"]) < 1100
        await still_serves(server)


@asynchronous
async def test_a_bad_field_of_a_stream_is_refused_before_it_begins() -> None:
    async with limited() as server:
        answer = await ask(server, *completion(stream=True, top_p=2))
        assert (answer.status, answer.error["param"]) == (400, "top_p")


@asynchronous
async def test_one_bad_prompt_of_several_ends_the_others() -> None:
    async with limited() as server:
        prompts = [[1, 2, 3]] * 8 + [[4096]]
        answer = await ask(server, COMPLETIONS, {"prompt": prompts, "max_tokens": 900})
        assert answer.status == 400
        await still_serves(server)


@asynchronous
async def test_what_does_not_fit_is_told_in_the_words_that_clients_look_for() -> None:
    """LiteLLM, for one, tells this error from others by a sentence."""
    documents = (
        {"prompt": [1] * 1024},
        {"prompt": "x " * 3000},
        {"prompt": "x" * 200_000},
        {"prompt": "a", "max_tokens": 1024},
    )
    async with echo_server(ECHO) as server:
        for document in documents:
            answer = await ask(server, COMPLETIONS, document)
            assert answer.status == 400
            assert answer.error["code"] == "context_length_exceeded"
            assert "this model's maximum context length is 1024 tokens" in answer.error["message"]
            assert answer.error["param"] == ("max_tokens" if "max_tokens" in document else "prompt")


@asynchronous
async def test_an_engine_without_a_tokenizer_takes_token_ids_only() -> None:
    async with echo_server(EchoEngine()) as server:
        answer = await ask(server, COMPLETIONS, {"prompt": "a"})
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        assert "built without a tokenizer" in answer.error["message"]
        answer = await ask(server, CHAT, {"messages": [USER]})
        assert (answer.status, answer.error["param"]) == (400, "messages")
        answer = await ask(server, COMPLETIONS, {"prompt": [1], "max_tokens": 1})
        assert answer.status == 200


@asynchronous
async def test_many_objects_in_a_small_body_cost_no_more_than_one_at_a_time() -> None:
    """Each is a hundred times its bytes as objects; refused before another is parsed."""
    hostile: tuple[dict[str, Any], ...] = (
        {"prompt": [[]] * 100_000},
        {"prompt": ["" for _ in range(100_000)]},
        {"prompt": [1] * 100_000},
        {"prompt": "a", "stop": [""] * 100_000},
        {"prompt": "a", "stop_token_ids": [1] * 100_000},
        {"prompt": "a", "logit_bias": {str(token): 200 for token in range(30_000)}},
        {"mystery": [[]] * 100_000, "prompt": [5000]},
    )
    async with limited() as server:
        for document in hostile:
            assert (await ask(server, COMPLETIONS, document)).status == 400
        for content in ([{"type": "text"}] * 25_000, [""] * 100_000):
            messages = {"messages": [{"role": "user", "content": content}]}
            assert (await ask(server, CHAT, messages)).status == 400
        assert (await ask(server, CHAT, {"messages": [{}] * 100_000})).status == 400
        await still_serves(server)
