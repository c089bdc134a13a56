"""Unmodified libraries that ask for an object of a class: an answer's text is its JSON.

Each asks in its own way for a `Record` (`MESSAGES`, temperature 0), and reads what comes by its own
parser. A way is a line of SHAPED.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tests.support.libraries import (
    MESSAGES,
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


class Tag(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: Literal["a", "b"]
    is_new: bool


class Record(BaseModel):
    """It has no texts of any length, nor properties of any name: a small model does not end."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["person", "thing"]
    main: Tag
    other: Tag | None


def _read(record: Any) -> Answer:
    assert isinstance(record, Record), record
    return Answer(record.model_dump_json())


# openai


async def _chat_parsed(question: Question) -> Answer:
    async with openai_client(question) as client:
        answer = await client.chat.completions.parse(
            response_format=Record, messages=MESSAGES, **chat_request(question)
        )
    return _read(answer.choices[0].message.parsed)


async def _chat_streamed(question: Question) -> Answer:
    async with (
        openai_client(question) as client,
        client.chat.completions.stream(
            response_format=Record, messages=MESSAGES, **chat_request(question)
        ) as stream,
    ):
        answer = await stream.get_final_completion()
    return _read(answer.choices[0].message.parsed)


async def _chat_called(question: Question) -> Answer:
    import openai

    async with openai_client(question) as client:
        answer = await client.chat.completions.parse(
            tools=[openai.pydantic_function_tool(Record)],
            tool_choice="required",
            parallel_tool_calls=False,
            messages=MESSAGES,
            **chat_request(question),
        )
    (call,) = answer.choices[0].message.tool_calls
    return _read(call.function.parsed_arguments)


async def _response_parsed(question: Question) -> Answer:
    async with openai_client(question) as client:
        response = await client.responses.parse(
            text_format=Record, input=QUESTION, **response_request(question)
        )
    return _read(response.output_parsed)


async def _response_streamed(question: Question) -> Answer:
    async with (
        openai_client(question) as client,
        client.responses.stream(
            text_format=Record, input=QUESTION, **response_request(question)
        ) as stream,
    ):
        response = await stream.get_final_response()
    return _read(response.output_parsed)


# anthropic


async def _message_parsed(question: Question) -> Answer:
    async with anthropic_client(question) as client:
        message = await client.messages.parse(
            output_format=Record, messages=MESSAGES[1:], **message_request(question)
        )
    return _read(message.parsed_output)


async def _message_streamed(question: Question) -> Answer:
    async with (
        anthropic_client(question) as client,
        client.messages.stream(
            output_format=Record, messages=MESSAGES[1:], **message_request(question)
        ) as stream,
    ):
        message = await stream.get_final_message()
    return _read(message.parsed_output)


async def _message_called(question: Question) -> Answer:
    tool = {"name": "Record", "input_schema": Record.model_json_schema()}
    choice = {"type": "tool", "name": "Record", "disable_parallel_tool_use": True}
    async with anthropic_client(question) as client:
        message = await client.messages.create(
            tools=[tool], tool_choice=choice, messages=MESSAGES[1:], **message_request(question)
        )
    (block,) = message.content
    assert message.stop_reason == "tool_use"
    return _read(Record.model_validate(block.input))


# ollama


async def _ollama_chat(question: Question) -> Answer:
    from ollama import AsyncClient

    answer = await AsyncClient(question.url("")).chat(
        question.model,
        MESSAGES,
        format=Record.model_json_schema(),
        options=ollama_options(question),
    )
    return _read(Record.model_validate_json(answer.message.content or ""))


async def _ollama_generate(question: Question) -> Answer:
    from ollama import AsyncClient

    parts = await AsyncClient(question.url("")).generate(
        question.model,
        QUESTION,
        system=SYSTEM,
        stream=True,
        format=Record.model_json_schema(),
        options=ollama_options(question),
    )
    text = "".join([part.response or "" async for part in parts])
    return _read(Record.model_validate_json(text))


# LangChain


def _of_langchain(make: Any, **options: Any) -> Ask:
    async def ask(question: Question) -> Answer:
        model = make(question).with_structured_output(Record, **options)
        return _read(await model.ainvoke(MESSAGES))

    return ask


# LiteLLM


def _of_litellm(model: str, path: str = "/v1") -> Ask:
    async def ask(question: Question) -> Answer:
        import litellm

        answer: Any = await litellm.acompletion(
            model=f"{model}/{question.model}", messages=MESSAGES, api_base=question.url(path),
            api_key="none", temperature=0, max_tokens=question.max_tokens,
            response_format=Record, num_retries=0, max_retries=0,
        )  # fmt: skip
        return _read(Record.model_validate_json(answer.choices[0].message.content))

    return ask


# openai-agents


def _of_agents(kind: str) -> Ask:
    async def ask(question: Question) -> Answer:
        import agents

        agent = agents.Agent(
            name="A",
            instructions=SYSTEM,
            model=getattr(agents, kind)(
                model=question.model, openai_client=openai_client(question)
            ),
            model_settings=agents.ModelSettings(temperature=0, max_tokens=question.max_tokens),
            output_type=Record,
        )
        return _read((await agents.Runner.run(agent, QUESTION)).final_output)

    return ask


# instructor


def _of_instructor(client: str, mode: str) -> Ask:
    async def ask(question: Question) -> Answer:
        import instructor

        made = {"openai": openai_client, "anthropic": anthropic_client}[client](question)
        patch = getattr(instructor, f"from_{client}")
        patched = patch(made, mode=instructor.Mode[mode])
        asked = (chat_request if client == "openai" else message_request)(question)
        messages = MESSAGES if client == "openai" else MESSAGES[1:]
        return _read(
            await patched.create(response_model=Record, max_retries=0, messages=messages, **asked)
        )

    return ask


SHAPED: Mapping[str, Ask] = {
    "openai, chat.completions.parse": _chat_parsed,
    "openai, chat.completions.stream": _chat_streamed,
    "openai, responses.parse": _response_parsed,
    "openai, responses.stream": _response_streamed,
    "anthropic, messages.parse": _message_parsed,
    "anthropic, messages.stream": _message_streamed,
    "ollama, chat": _ollama_chat,
    "ollama, generate": _ollama_generate,
    "langchain-openai": _of_langchain(chat_openai, method="json_schema"),
    "langchain-openai, responses": _of_langchain(responses_openai, method="json_schema"),
    "langchain-anthropic": _of_langchain(chat_anthropic, method="json_schema"),
    "langchain-ollama": _of_langchain(chat_ollama, method="json_schema"),
    "LiteLLM, OpenAI": _of_litellm("openai"),
    "LiteLLM, vLLM": _of_litellm("hosted_vllm"),
    "LiteLLM, Ollama": _of_litellm("ollama_chat", ""),
    "openai-agents, chat completions": _of_agents("OpenAIChatCompletionsModel"),
    "openai-agents, responses": _of_agents("OpenAIResponsesModel"),
    "instructor, JSON schema": _of_instructor("openai", "JSON_SCHEMA"),
}

SHAPED_BY_TOOLS: Mapping[str, Ask] = {
    "openai": _chat_called,
    "anthropic": _message_called,
    "langchain-openai": _of_langchain(chat_openai, method="function_calling"),
    "langchain-openai, responses": _of_langchain(responses_openai, method="function_calling"),
    "langchain-anthropic": _of_langchain(chat_anthropic, method="function_calling"),
    "instructor": _of_instructor("openai", "TOOLS"),
    "instructor, Anthropic": _of_instructor("anthropic", "ANTHROPIC_TOOLS"),
}
"""By the arguments of a tool that has to be called."""
