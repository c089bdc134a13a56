"""Unmodified libraries that applications ask models through: texts, whole and streamed.

A library is a line of LIBRARIES. They run in a process of their own: `library_process`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SYSTEM, QUESTION = "Be brief.", "def f("
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


@dataclass(frozen=True)
class Question:
    """MESSAGES, unless the library's function has its own, at temperature 0."""

    port: int
    max_tokens: int
    retries: int = 0
    model: str = "echo"
    stop_token_ids: Sequence[int] = ()
    """For openai-agents, which takes an answer that max_tokens ended for an error."""

    def url(self, path: str = "/v1") -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@dataclass(frozen=True)
class Answer:
    """What a library told of an answer, or of an error."""

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: Sequence[str] = ()
    """Names of the exception's classes, nearest first."""
    message: str = ""
    called: Sequence[str] = ()
    """What the tools gave that it ran."""


Ask = Callable[[Question], Awaitable[Answer]]


@dataclass(frozen=True)
class Library:
    whole: Ask
    streamed: Ask
    left: Ask | None
    """Leaves a stream after its first text, which it answers. None: it has no way to."""


# SDKs: clients, and the fields of their requests


def openai_client(question: Question) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url=question.url(), api_key="none", max_retries=question.retries, timeout=30
    )


def anthropic_client(question: Question) -> Any:
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(
        base_url=question.url(""), api_key="none", max_retries=question.retries, timeout=30
    )


def chat_request(question: Question) -> dict[str, Any]:
    """Without messages."""
    return {"model": question.model, "max_tokens": question.max_tokens, "temperature": 0}


def response_request(question: Question) -> dict[str, Any]:
    """Without input."""
    return {
        "model": question.model,
        "instructions": SYSTEM,
        "max_output_tokens": question.max_tokens,
        "temperature": 0,
    }


def message_request(question: Question) -> dict[str, Any]:
    """Without messages."""
    return {
        "model": question.model,
        "system": SYSTEM,
        "max_tokens": question.max_tokens,
        "extra_body": {"temperature": 0},
    }


def ollama_options(question: Question) -> dict[str, Any]:
    return {"num_predict": question.max_tokens, "temperature": 0}


# LangChain


def chat_openai(question: Question, **options: Any) -> Any:
    import langchain_openai

    make: Any = langchain_openai.ChatOpenAI
    return make(
        model=question.model, base_url=question.url(), api_key="none", temperature=0,
        max_tokens=question.max_tokens, max_retries=question.retries, stream_usage=True, **options,
    )  # fmt: skip


def responses_openai(question: Question) -> Any:
    return chat_openai(question, use_responses_api=True)


def chat_anthropic(question: Question) -> Any:
    import langchain_anthropic

    make: Any = langchain_anthropic.ChatAnthropic
    return make(
        model=question.model, base_url=question.url(""), api_key="none", temperature=0,
        max_tokens=question.max_tokens, max_retries=question.retries,
    )  # fmt: skip


def chat_ollama(question: Question) -> Any:
    import langchain_ollama

    return langchain_ollama.ChatOllama(
        model=question.model, base_url=question.url(""), temperature=0,
        num_predict=question.max_tokens,
    )  # fmt: skip


def _of_langchain(make: Callable[[Question], Any]) -> Library:
    def read(message: Any) -> Answer:
        usage = message.usage_metadata
        return Answer(message.text, usage["input_tokens"], usage["output_tokens"])

    async def whole(question: Question) -> Answer:
        return read(await make(question).ainvoke(MESSAGES))

    async def streamed(question: Question) -> Answer:
        chunks = [one async for one in make(question).astream(MESSAGES)]
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        return read(whole)

    async def left(question: Question) -> Answer:
        return await _first_text(make(question).astream(MESSAGES), lambda chunk: chunk.text)

    return Library(whole, streamed, left)


async def _first_text(stream: AsyncIterator[Any], text: Callable[[Any], str]) -> Answer:
    """The first piece that has one; the stream is closed behind it."""
    try:
        async for piece in stream:
            if found := text(piece):
                return Answer(found)
        return Answer()
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


# LiteLLM


def _of_litellm(model: str, path: str = "/v1", *, can_leave: bool = True) -> Library:
    def call(question: Question, *, stream: bool) -> Awaitable[Any]:
        import litellm

        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        answer: Awaitable[Any] = litellm.acompletion(
            model=f"{model}/{question.model}", messages=MESSAGES, api_base=question.url(path),
            api_key="none", temperature=0, max_tokens=question.max_tokens, stream=stream,
            num_retries=question.retries, max_retries=0, **options,
        )  # fmt: skip
        return answer

    async def whole(question: Question) -> Answer:
        answer = await call(question, stream=False)
        text = answer.choices[0].message.content
        return Answer(text, answer.usage.prompt_tokens, answer.usage.completion_tokens)

    async def streamed(question: Question) -> Answer:
        chunks = [one async for one in await call(question, stream=True)]
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        usage = next(one.usage for one in reversed(chunks) if getattr(one, "usage", None))
        return Answer(text, usage.prompt_tokens, usage.completion_tokens)

    async def left(question: Question) -> Answer:
        stream = await call(question, stream=True)
        return await _first_text(stream, lambda chunk: chunk.choices[0].delta.content or "")

    return Library(whole, streamed, left if can_leave else None)


# openai-agents


def _of_agents(kind: str) -> Library:
    def agent(question: Question) -> Any:
        import agents

        client = openai_client(question)
        return agents.Agent(
            name="A",
            instructions=SYSTEM,
            model=getattr(agents, kind)(model=question.model, openai_client=client),
            model_settings=agents.ModelSettings(
                temperature=0,
                max_tokens=question.max_tokens,
                include_usage=True,
                extra_body={"stop_token_ids": list(question.stop_token_ids)},
            ),
        )

    def read(result: Any) -> Answer:
        usage = result.context_wrapper.usage
        return Answer(result.final_output, usage.input_tokens, usage.output_tokens)

    async def whole(question: Question) -> Answer:
        import agents

        return read(await agents.Runner.run(agent(question), QUESTION))

    async def streamed(question: Question) -> Answer:
        import agents

        result = agents.Runner.run_streamed(agent(question), QUESTION)
        async for _ in result.stream_events():
            pass
        return read(result)

    async def left(question: Question) -> Answer:
        import agents

        result = agents.Runner.run_streamed(agent(question), QUESTION)
        async for event in result.stream_events():
            if text := _delta(event):
                result.cancel()
                return Answer(text)
        return Answer()

    return Library(whole, streamed, left)


def _delta(event: Any) -> str:
    data = getattr(event, "data", None)
    is_text = getattr(data, "type", "") == "response.output_text.delta"
    return data.delta if data is not None and is_text else ""


LIBRARIES: Mapping[str, Library] = {
    "langchain-openai": _of_langchain(chat_openai),
    "langchain-openai, responses": _of_langchain(responses_openai),
    "langchain-anthropic": _of_langchain(chat_anthropic),
    "langchain-ollama": _of_langchain(chat_ollama),
    "LiteLLM, OpenAI": _of_litellm("openai"),
    # These read on to the end after aclose().
    "LiteLLM, vLLM": _of_litellm("hosted_vllm", can_leave=False),
    "LiteLLM, Anthropic": _of_litellm("anthropic", "", can_leave=False),
    "LiteLLM, Ollama": _of_litellm("ollama_chat", "", can_leave=False),
    "openai-agents, chat completions": _of_agents("OpenAIChatCompletionsModel"),
    "openai-agents, responses": _of_agents("OpenAIResponsesModel"),
}
