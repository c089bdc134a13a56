"""Unmodified libraries that let a model call a tool, run it, and give back what it gave.

The tool is `get_weather`; an answer's text is what the model says in the end. A way is a line of
CALLED, where the model calls by itself, or of FORCED, where it has to in its first answer.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

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
    chat_request,
    message_request,
    ollama_options,
    openai_client,
    response_request,
    responses_openai,
)

MAX_TURNS = 4
STOPS = {"stop": ["(", ".", "\n\n", ">\n<", "    ", ">>", "_response", "= "]}
"""Ends an answer of a small model, where a library takes one that max_tokens cut for an error."""
NAME, DESCRIPTION = "get_weather", "The weather of a city."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
    "maxProperties": 1,  # LiteLLM drops the line above for vLLM
}
FUNCTION = {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
City = Annotated[str, Field(max_length=8)]
"""So that a small model ends it."""


def get_weather(city: City) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    return f"{city} has {len(city)} degrees"


class GetWeather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"maxProperties": 1})

    city: City


class Called:
    """Runs the tool, and keeps what it gave."""

    def __init__(self) -> None:
        self.gave: list[str] = []

    def run(self, **arguments: Any) -> str:
        self.gave.append(get_weather(**arguments))
        return self.gave[-1]

    def answer(self, text: str) -> Answer:
        return Answer(text, called=self.gave)


def _messages() -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


# openai


async def _chat_loop(
    question: Question, ask: Callable[[Any, dict[str, Any]], Any], *, force: bool = False
) -> Answer:
    messages, called = _messages(), Called()
    forced: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": NAME}}}
    async with openai_client(question) as client:
        for turn in range(MAX_TURNS):
            asked = {**chat_request(question), "messages": messages, "tools": [TOOL]}
            asked |= forced if force and turn == 0 else {}
            choice = (await ask(client, asked)).choices[0]
            if choice.finish_reason != "tool_calls":
                assert not choice.message.tool_calls
                return called.answer(choice.message.content)
            extra = choice.message.model_extra
            assert extra.get("reasoning_content") == extra.get("reasoning")
            messages.append(choice.message.model_dump(exclude_unset=True))
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": called.run(**json.loads(call.function.arguments)),
                }
                for call in choice.message.tool_calls
            ]
    return Answer()


def _chat_created(*, force: bool) -> Ask:
    async def ask(question: Question) -> Answer:
        return await _chat_loop(
            question,
            lambda client, asked: client.chat.completions.create(**asked),
            force=force,
        )

    return ask


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


def _chat_streamed(*, force: bool) -> Ask:
    async def complete(client: Any, asked: dict[str, Any]) -> Any:
        async with client.chat.completions.stream(**asked) as stream:
            return await stream.get_final_completion()

    async def ask(question: Question) -> Answer:
        return await _chat_loop(question, complete, force=force)

    return ask


RESPONSES_TOOL: dict[str, Any] = {"type": "function", "strict": True, **FUNCTION}


async def _response_loop(
    question: Question, ask: Callable[[Any, dict[str, Any]], Any], *, force: bool = False
) -> Answer:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    called = Called()
    async with openai_client(question) as client:
        for turn in range(MAX_TURNS):
            asked = {**response_request(question), "input": items, "tools": [RESPONSES_TOOL]}
            if force:
                asked["tool_choice"] = "none" if turn else {"type": "function", "name": NAME}
                asked["extra_body"] = STOPS
            response = await ask(client, asked)
            calls = [one for one in response.output if one.type == "function_call"]
            if not calls:
                return called.answer(response.output_text)
            items += [one.model_dump(exclude_unset=True) for one in response.output]
            items += [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": called.run(**json.loads(call.arguments)),
                }
                for call in calls
            ]
    return Answer()


def _response_created(*, force: bool) -> Ask:
    async def ask(question: Question) -> Answer:
        return await _response_loop(
            question, lambda client, asked: client.responses.create(**asked), force=force
        )

    return ask


def _response_streamed(*, force: bool) -> Ask:
    async def complete(client: Any, asked: dict[str, Any]) -> Any:
        async with client.responses.stream(**asked) as stream:
            return await stream.get_final_response()

    async def ask(question: Question) -> Answer:
        return await _response_loop(question, complete, force=force)

    return ask


def _response_run(*, stream: bool) -> Ask:
    async def ask(question: Question) -> Answer:
        from openai.lib.responses_tool_runner import (
            AsyncRegisteredFunction,
            AsyncResponsesToolRunner,
        )

        async def execute(arguments: Mapping[str, Any]) -> str:
            return get_weather(**arguments)

        asked: Any = {**response_request(question), "input": QUESTION}
        tool: Any = RESPONSES_TOOL
        runner = AsyncResponsesToolRunner(functions=[AsyncRegisteredFunction(tool, execute)])
        async with openai_client(question) as client:
            response = await runner.run(client, asked, max_steps=MAX_TURNS, stream=stream)
        return Answer(response.output_text)

    return ask


# anthropic


ANTHROPIC_TOOL: Any = {"name": NAME, "description": DESCRIPTION, "input_schema": SCHEMA}


async def _message_loop(
    question: Question, ask: Callable[[Any, dict[str, Any]], Any], *, force: bool = False
) -> Answer:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    called = Called()
    async with anthropic_client(question) as client:
        for turn in range(MAX_TURNS):
            asked = {**message_request(question), "messages": messages, "tools": [ANTHROPIC_TOOL]}
            if force and turn == 0:
                asked["tool_choice"] = {"type": "tool", "name": NAME}
            message = await ask(client, asked)
            if message.stop_reason != "tool_use":
                return called.answer(_text_of(message.content))
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": called.run(**block.input),
                }
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
    return Answer()


def _text_of(blocks: Sequence[Any]) -> str:
    return "".join(block.text for block in blocks if block.type == "text")


def _message_created(*, force: bool) -> Ask:
    async def ask(question: Question) -> Answer:
        return await _message_loop(
            question, lambda client, asked: client.messages.create(**asked), force=force
        )

    return ask


def _message_streamed(*, force: bool) -> Ask:
    async def complete(client: Any, asked: dict[str, Any]) -> Any:
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    async def ask(question: Question) -> Answer:
        return await _message_loop(question, complete, force=force)

    return ask


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
                **message_request(question),
            )
            last = await runner.until_done()
        return Answer(_text_of(last.content))

    return ask


# ollama

CALL_GRAMMAR = "call"
"""Name of a grammar whose texts are calls of the tool."""


async def _ollama_loop(question: Question, *, stream: bool, force: bool) -> Answer:
    from ollama import AsyncClient

    messages, called = _messages(), Called()
    client = AsyncClient(question.url(""))
    for turn in range(MAX_TURNS):
        asked: Any = {
            "model": question.model,
            "messages": messages,
            "tools": [get_weather],  # the client reads its signature
            "options": ollama_options(question),
        }
        if force and turn == 0:  # there is no tool_choice: a grammar of the engine
            asked["format"] = {"named": CALL_GRAMMAR}
        if stream:
            parts = [one.message async for one in await client.chat(**asked, stream=True)]
        else:
            parts = [(await client.chat(**asked)).message]
        text = "".join(one.content or "" for one in parts)
        calls = [call for one in parts for call in one.tool_calls or ()]
        if not calls:
            return called.answer(text)
        thinking = "".join(one.thinking or "" for one in parts)
        messages.append(
            {"role": "assistant", "content": text, "thinking": thinking, "tool_calls": calls}
        )
        messages += [
            {
                "role": "tool",
                "tool_name": call.function.name,
                "content": called.run(**call.function.arguments),
            }
            for call in calls
        ]
    return Answer()


def _ollama(*, stream: bool, force: bool = False) -> Ask:
    async def ask(question: Question) -> Answer:
        return await _ollama_loop(question, stream=stream, force=force)

    return ask


# LangChain


def _of_langchain(make: Any, *, stream: bool, force: bool = False) -> Ask:
    async def ask(question: Question) -> Answer:
        from langchain_core.messages import HumanMessage, SystemMessage
        from langchain_core.tools import tool

        called = Called()
        run = tool(NAME, description=DESCRIPTION, args_schema=GetWeather)(called.run)
        messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
        for turn in range(MAX_TURNS):
            choice = {"tool_choice": NAME} if force and turn == 0 else {}
            # Of `run` it would drop `additionalProperties`, and a small model would go on.
            model = make(question).bind_tools([TOOL], **choice)
            if stream:
                chunks = [one async for one in model.astream(messages)]
                answer = sum(chunks[1:], start=chunks[0])
            else:
                answer = await model.ainvoke(messages)
            if not answer.tool_calls:
                return called.answer(answer.text)
            messages.append(answer)
            messages += [await run.ainvoke(call) for call in answer.tool_calls]
        return Answer()

    return ask


# LiteLLM


def _of_litellm(model: str, path: str = "/v1", *, stream: bool, force: bool = False) -> Ask:
    async def ask(question: Question) -> Answer:
        import litellm

        messages, called = _messages(), Called()
        for turn in range(MAX_TURNS):
            forced = {"tool_choice": {"type": "function", "function": {"name": NAME}}}
            answer: Any = await litellm.acompletion(
                model=f"{model}/{question.model}", messages=messages, api_base=question.url(path),
                api_key="none", temperature=0, max_tokens=question.max_tokens, stream=stream,
                tools=[TOOL], num_retries=0, max_retries=0,
                **(forced if force and turn == 0 else {}),
            )  # fmt: skip
            if stream:
                answer = litellm.stream_chunk_builder([one async for one in answer])
            message = answer.choices[0].message
            if not message.tool_calls:
                return called.answer(message.content)
            messages.append(message.model_dump(exclude_none=True))
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": called.run(**json.loads(call.function.arguments)),
                }
                for call in message.tool_calls
            ]
        return Answer()

    return ask


# openai-agents


def _of_agents(kind: str, *, stream: bool, force: bool = False) -> Ask:
    async def ask(question: Question) -> Answer:
        import agents

        called = Called()

        def run(city: City) -> str:
            return called.run(city=city)

        tool = agents.function_tool(run, name_override=NAME, description_override=DESCRIPTION)
        agent = agents.Agent(
            name="A",
            instructions=SYSTEM,
            model=getattr(agents, kind)(
                model=question.model, openai_client=openai_client(question)
            ),
            # The choice is of the first turn: the agent's `reset_tool_choice`.
            model_settings=agents.ModelSettings(
                temperature=0,
                max_tokens=question.max_tokens,
                tool_choice=NAME if force else None,
                extra_body=STOPS if force else None,
            ),
            tools=[tool],
        )
        if not stream:
            result: Any = await agents.Runner.run(agent, QUESTION, max_turns=MAX_TURNS)
            return called.answer(result.final_output)
        result = agents.Runner.run_streamed(agent, QUESTION, max_turns=MAX_TURNS)
        async for _ in result.stream_events():
            pass
        return called.answer(result.final_output)

    return ask


# instructor


async def _instructed(question: Question) -> Answer:
    """The call is an object of its class; the second answer is text, as the client gives it."""
    import instructor

    called = Called()
    async with openai_client(question) as client:
        patched: Any = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
        asked = chat_request(question)
        arguments, answer = await patched.chat.completions.create_with_completion(
            response_model=GetWeather, max_retries=0, messages=_messages(), **asked
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        gave = called.run(**arguments.model_dump())
        messages = [
            *_messages(),
            message.model_dump(exclude_unset=True),
            {"role": "tool", "tool_call_id": call.id, "content": gave},
        ]
        last = await patched.chat.completions.create(
            response_model=None, messages=messages, **asked
        )
    return called.answer(last.choices[0].message.content)


CALLED: Mapping[str, Ask] = {
    "openai, chat.completions.create": _chat_created(force=False),
    "openai, chat.completions.parse": _chat_parsed,
    "openai, chat.completions.stream": _chat_streamed(force=False),
    "openai, responses.create": _response_created(force=False),
    "openai, responses.stream": _response_streamed(force=False),
    "openai, tool runner": _response_run(stream=False),
    "openai, tool runner, streamed": _response_run(stream=True),
    "anthropic, messages.create": _message_created(force=False),
    "anthropic, messages.stream": _message_streamed(force=False),
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

FORCED: Mapping[str, Ask] = {
    "openai, chat.completions.create": _chat_created(force=True),
    "openai, responses.create": _response_created(force=True),
    "openai, responses.stream": _response_streamed(force=True),
    "anthropic, messages.create": _message_created(force=True),
    "anthropic, messages.stream": _message_streamed(force=True),
    "ollama, chat": _ollama(stream=False, force=True),
    "ollama, chat, streamed": _ollama(stream=True, force=True),
    "langchain-openai": _of_langchain(chat_openai, stream=False, force=True),
    "langchain-openai, streamed": _of_langchain(chat_openai, stream=True, force=True),
    "langchain-openai, responses": _of_langchain(responses_openai, stream=False, force=True),
    "langchain-anthropic": _of_langchain(chat_anthropic, stream=False, force=True),
    "langchain-anthropic, streamed": _of_langchain(chat_anthropic, stream=True, force=True),
    "LiteLLM, OpenAI": _of_litellm("openai", stream=False, force=True),
    "LiteLLM, OpenAI, streamed": _of_litellm("openai", stream=True, force=True),
    "LiteLLM, vLLM": _of_litellm("hosted_vllm", stream=False, force=True),
    # LiteLLM sends Anthropic's servers a schema without bounds of an object.
    "openai-agents, chat completions": _of_agents(
        "OpenAIChatCompletionsModel", stream=False, force=True
    ),
    "openai-agents, responses": _of_agents("OpenAIResponsesModel", stream=False, force=True),
    "openai-agents, responses, streamed": _of_agents(
        "OpenAIResponsesModel", stream=True, force=True
    ),
    "instructor": _instructed,
}
