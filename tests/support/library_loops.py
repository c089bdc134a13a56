"""Unmodified libraries that let a model call a tool, run it, and give back what it gave.

The tool is `get_weather`; an answer's text is what the model says in the end. A way is a line of
CALLED.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from tests.support.libraries import (
    QUESTION,
    SYSTEM,
    Answer,
    Ask,
    Question,
    anthropic_client,
    chat_anthropic,
    chat_ollama,
    chat_openai,
    openai_client,
    responses_openai,
)

MAX_TURNS = 4
NAME, DESCRIPTION = "get_weather", "The weather of a city."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    return f"{city} has {len(city)} degrees"


class GetWeather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: str


def _messages() -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


# openai


def _chat(question: Question) -> dict[str, Any]:
    return {
        "model": question.model,
        "max_tokens": question.max_tokens,
        "temperature": 0,
        "tools": [{"type": "function", "function": FUNCTION}],
    }


async def _chat_loop(question: Question, ask: Callable[[Any, dict[str, Any]], Any]) -> Answer:
    messages = _messages()
    async with openai_client(question) as client:
        for _ in range(MAX_TURNS):
            choice = (await ask(client, {**_chat(question), "messages": messages})).choices[0]
            if choice.finish_reason != "tool_calls":
                assert not choice.message.tool_calls
                return Answer(choice.message.content)
            assert choice.message.reasoning_content == choice.message.reasoning
            messages.append(choice.message.model_dump(exclude_unset=True))
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": get_weather(**json.loads(call.function.arguments)),
                }
                for call in choice.message.tool_calls
            ]
    return Answer()


async def _chat_created(question: Question) -> Answer:
    return await _chat_loop(question, lambda client, asked: client.chat.completions.create(**asked))


async def _chat_parsed(question: Question) -> Answer:
    """With a class in place of the schema, which makes it strict."""
    import openai

    async def ask(client: Any, asked: dict[str, Any]) -> Any:
        tool = openai.pydantic_function_tool(GetWeather, name=NAME, description=DESCRIPTION)
        answer = await client.chat.completions.parse(**{**asked, "tools": [tool]})
        for call in answer.choices[0].message.tool_calls or ():
            assert isinstance(call.function.parsed_arguments, GetWeather)
        return answer

    return await _chat_loop(question, ask)


async def _chat_streamed(question: Question) -> Answer:
    async def ask(client: Any, asked: dict[str, Any]) -> Any:
        async with client.chat.completions.stream(**asked) as stream:
            return await stream.get_final_completion()

    return await _chat_loop(question, ask)


def _response(question: Question) -> dict[str, Any]:
    return {
        "model": question.model,
        "instructions": SYSTEM,
        "max_output_tokens": question.max_tokens,
        "temperature": 0,
        "tools": [{"type": "function", "strict": True, **FUNCTION}],
    }


async def _response_loop(question: Question, ask: Callable[[Any, dict[str, Any]], Any]) -> Answer:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    async with openai_client(question) as client:
        for _ in range(MAX_TURNS):
            response = await ask(client, {**_response(question), "input": items})
            calls = [one for one in response.output if one.type == "function_call"]
            if not calls:
                return Answer(response.output_text)
            items += [one.model_dump(exclude_unset=True) for one in response.output]
            items += [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": get_weather(**json.loads(call.arguments)),
                }
                for call in calls
            ]
    return Answer()


async def _response_created(question: Question) -> Answer:
    return await _response_loop(question, lambda client, asked: client.responses.create(**asked))


async def _response_streamed(question: Question) -> Answer:
    async def ask(client: Any, asked: dict[str, Any]) -> Any:
        async with client.responses.stream(**asked) as stream:
            return await stream.get_final_response()

    return await _response_loop(question, ask)


def _response_run(*, stream: bool) -> Ask:
    async def ask(question: Question) -> Answer:
        from openai.lib.responses_tool_runner import (
            AsyncRegisteredFunction,
            AsyncResponsesToolRunner,
        )

        async def execute(arguments: Mapping[str, Any]) -> str:
            return get_weather(**arguments)

        asked: Any = {**_response(question), "input": QUESTION}
        (tool,) = asked.pop("tools")
        runner = AsyncResponsesToolRunner(functions=[AsyncRegisteredFunction(tool, execute)])
        async with openai_client(question) as client:
            response = await runner.run(client, asked, max_steps=MAX_TURNS, stream=stream)
        return Answer(response.output_text)

    return ask


# anthropic


def _message(question: Question) -> dict[str, Any]:
    return {
        "model": question.model,
        "system": SYSTEM,
        "max_tokens": question.max_tokens,
        "extra_body": {"temperature": 0},
    }


ANTHROPIC_TOOL: Any = {"name": NAME, "description": DESCRIPTION, "input_schema": SCHEMA}


async def _message_loop(question: Question, ask: Callable[[Any, dict[str, Any]], Any]) -> Answer:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with anthropic_client(question) as client:
        for _ in range(MAX_TURNS):
            asked = {**_message(question), "messages": messages, "tools": [ANTHROPIC_TOOL]}
            message = await ask(client, asked)
            if message.stop_reason != "tool_use":
                return Answer(_text_of(message.content))
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": get_weather(**block.input),
                }
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
    return Answer()


def _text_of(blocks: Sequence[Any]) -> str:
    return "".join(block.text for block in blocks if block.type == "text")


async def _message_created(question: Question) -> Answer:
    return await _message_loop(question, lambda client, asked: client.messages.create(**asked))


async def _message_streamed(question: Question) -> Answer:
    async def ask(client: Any, asked: dict[str, Any]) -> Any:
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    return await _message_loop(question, ask)


def _message_run(*, stream: bool) -> Ask:
    async def ask(question: Question) -> Answer:
        from anthropic import beta_async_tool

        @beta_async_tool(name=NAME, description=DESCRIPTION, input_schema=SCHEMA)
        async def run(city: str) -> str:
            return get_weather(city)

        async with anthropic_client(question) as client:
            runner = client.beta.messages.tool_runner(
                messages=[{"role": "user", "content": QUESTION}],
                tools=[run],
                max_iterations=MAX_TURNS,
                stream=stream,
                **_message(question),
            )
            last = await runner.until_done()
        return Answer(_text_of(last.content))

    return ask


# ollama


async def _ollama_loop(question: Question, *, stream: bool) -> Answer:
    from ollama import AsyncClient

    messages = _messages()
    client = AsyncClient(question.url(""))
    for _ in range(MAX_TURNS):
        asked: Any = {
            "model": question.model,
            "messages": messages,
            "tools": [get_weather],  # the client reads its signature
            "options": {"num_predict": question.max_tokens, "temperature": 0},
        }
        if stream:
            parts = [one.message async for one in await client.chat(**asked, stream=True)]
        else:
            parts = [(await client.chat(**asked)).message]
        text = "".join(one.content or "" for one in parts)
        calls = [call for one in parts for call in one.tool_calls or ()]
        if not calls:
            return Answer(text)
        thinking = "".join(one.thinking or "" for one in parts)
        messages.append(
            {"role": "assistant", "content": text, "thinking": thinking, "tool_calls": calls}
        )
        messages += [
            {
                "role": "tool",
                "tool_name": call.function.name,
                "content": get_weather(**call.function.arguments),
            }
            for call in calls
        ]
    return Answer()


def _ollama(*, stream: bool) -> Ask:
    async def ask(question: Question) -> Answer:
        return await _ollama_loop(question, stream=stream)

    return ask


# LangChain


def _of_langchain(make: Any, *, stream: bool) -> Ask:
    async def ask(question: Question) -> Answer:
        from langchain_core.messages import HumanMessage, SystemMessage
        from langchain_core.tools import tool

        run = tool(NAME, description=DESCRIPTION)(get_weather)
        model = make(question).bind_tools([run])
        messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
        for _ in range(MAX_TURNS):
            if stream:
                chunks = [one async for one in model.astream(messages)]
                answer = sum(chunks[1:], start=chunks[0])
            else:
                answer = await model.ainvoke(messages)
            if not answer.tool_calls:
                return Answer(answer.text)
            messages.append(answer)
            messages += [await run.ainvoke(call) for call in answer.tool_calls]
        return Answer()

    return ask


# LiteLLM


def _of_litellm(model: str, path: str = "/v1", *, stream: bool) -> Ask:
    async def ask(question: Question) -> Answer:
        import litellm

        messages = _messages()
        for _ in range(MAX_TURNS):
            answer: Any = await litellm.acompletion(
                model=f"{model}/{question.model}", messages=messages, api_base=question.url(path),
                api_key="none", temperature=0, max_tokens=question.max_tokens, stream=stream,
                tools=[{"type": "function", "function": FUNCTION}], num_retries=0, max_retries=0,
            )  # fmt: skip
            if stream:
                answer = litellm.stream_chunk_builder([one async for one in answer])
            message = answer.choices[0].message
            if not message.tool_calls:
                return Answer(message.content)
            messages.append(message.model_dump(exclude_none=True))
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": get_weather(**json.loads(call.function.arguments)),
                }
                for call in message.tool_calls
            ]
        return Answer()

    return ask


# openai-agents


def _of_agents(kind: str, *, stream: bool) -> Ask:
    async def ask(question: Question) -> Answer:
        import agents

        agent = agents.Agent(
            name="A",
            instructions=SYSTEM,
            model=getattr(agents, kind)(
                model=question.model, openai_client=openai_client(question)
            ),
            model_settings=agents.ModelSettings(temperature=0, max_tokens=question.max_tokens),
            tools=[agents.function_tool(get_weather)],
        )
        if not stream:
            result: Any = await agents.Runner.run(agent, QUESTION, max_turns=MAX_TURNS)
            return Answer(result.final_output)
        result = agents.Runner.run_streamed(agent, QUESTION, max_turns=MAX_TURNS)
        async for _ in result.stream_events():
            pass
        return Answer(result.final_output)

    return ask


CALLED: Mapping[str, Ask] = {
    "openai, chat.completions.create": _chat_created,
    "openai, chat.completions.parse": _chat_parsed,
    "openai, chat.completions.stream": _chat_streamed,
    "openai, responses.create": _response_created,
    "openai, responses.stream": _response_streamed,
    "openai, tool runner": _response_run(stream=False),
    "openai, tool runner, streamed": _response_run(stream=True),
    "anthropic, messages.create": _message_created,
    "anthropic, messages.stream": _message_streamed,
    "anthropic, tool runner": _message_run(stream=False),
    "anthropic, tool runner, streamed": _message_run(stream=True),
    "ollama, chat": _ollama(stream=False),
    "ollama, chat, streamed": _ollama(stream=True),
    "langchain-openai": _of_langchain(chat_openai, stream=False),
    "langchain-openai, streamed": _of_langchain(chat_openai, stream=True),
    "langchain-openai, responses": _of_langchain(responses_openai, stream=False),
    "langchain-openai, responses, streamed": _of_langchain(responses_openai, stream=True),
    "langchain-anthropic": _of_langchain(chat_anthropic, stream=False),
    "langchain-anthropic, streamed": _of_langchain(chat_anthropic, stream=True),
    "langchain-ollama": _of_langchain(chat_ollama, stream=False),
    "langchain-ollama, streamed": _of_langchain(chat_ollama, stream=True),
    "LiteLLM, OpenAI": _of_litellm("openai", stream=False),
    "LiteLLM, OpenAI, streamed": _of_litellm("openai", stream=True),
    "LiteLLM, vLLM": _of_litellm("hosted_vllm", stream=False),
    "LiteLLM, Anthropic": _of_litellm("anthropic", "", stream=False),
    "LiteLLM, Anthropic, streamed": _of_litellm("anthropic", "", stream=True),
    "LiteLLM, Ollama": _of_litellm("ollama_chat", "", stream=False),
    "LiteLLM, Ollama, streamed": _of_litellm("ollama_chat", "", stream=True),
    "openai-agents, chat completions": _of_agents("OpenAIChatCompletionsModel", stream=False),
    "openai-agents, chat completions, streamed": _of_agents(
        "OpenAIChatCompletionsModel", stream=True
    ),
    "openai-agents, responses": _of_agents("OpenAIResponsesModel", stream=False),
    "openai-agents, responses, streamed": _of_agents("OpenAIResponsesModel", stream=True),
}
