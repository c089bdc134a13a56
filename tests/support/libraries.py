"""Unmodified libraries that applications ask models through, in a process of their own.

They block event loops, leave sockets to the garbage collector and read settings from the
environment, so a test talks with them over pipes: `python -m tests.support.libraries`, a JSON line
in, a JSON line out. A library is a line of LIBRARIES.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SYSTEM, QUESTION = "Be brief.", "def f("
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
_ENVIRONMENT = {
    # Nothing is asked of anybody else, and nothing told.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Question:
    """MESSAGES, at temperature 0."""

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


Ask = Callable[[Question], Awaitable[Answer]]


@dataclass(frozen=True)
class Library:
    whole: Ask
    streamed: Ask
    left: Ask | None
    """Leaves a stream after its first text, which it answers. None: it has no way to."""


# LangChain


def _chat_openai(question: Question, **options: Any) -> Any:
    import langchain_openai

    make: Any = langchain_openai.ChatOpenAI
    return make(
        model=question.model, base_url=question.url(), api_key="none", temperature=0,
        max_tokens=question.max_tokens, max_retries=question.retries, stream_usage=True, **options,
    )  # fmt: skip


def _responses(question: Question) -> Any:
    return _chat_openai(question, use_responses_api=True)


def _chat_anthropic(question: Question) -> Any:
    import langchain_anthropic

    make: Any = langchain_anthropic.ChatAnthropic
    return make(
        model=question.model, base_url=question.url(""), api_key="none", temperature=0,
        max_tokens=question.max_tokens, max_retries=question.retries,
    )  # fmt: skip


def _chat_ollama(question: Question) -> Any:
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
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=question.url(), api_key="none", max_retries=question.retries)
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
    "langchain-openai": _of_langchain(_chat_openai),
    "langchain-openai, responses": _of_langchain(_responses),
    "langchain-anthropic": _of_langchain(_chat_anthropic),
    "langchain-ollama": _of_langchain(_chat_ollama),
    "LiteLLM, OpenAI": _of_litellm("openai"),
    # These read on to the end after aclose().
    "LiteLLM, vLLM": _of_litellm("hosted_vllm", can_leave=False),
    "LiteLLM, Anthropic": _of_litellm("anthropic", "", can_leave=False),
    "LiteLLM, Ollama": _of_litellm("ollama_chat", "", can_leave=False),
    "openai-agents, chat completions": _of_agents("OpenAIChatCompletionsModel"),
    "openai-agents, responses": _of_agents("OpenAIResponsesModel"),
}


class Libraries:
    """The process that has them."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    async def ask(self, library: str, how: str, *questions: Question) -> list[Answer]:
        """Ask all at once; `how` is a field of Library."""
        asked = {"library": library, "how": how, "questions": [asdict(one) for one in questions]}
        line = await asyncio.to_thread(self._exchange, json.dumps(asked))
        return [Answer(**{**one, "errors": tuple(one["errors"])}) for one in json.loads(line)]

    def _exchange(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process of the libraries has ended"
        return answer


@contextmanager
def libraries() -> Iterator[Libraries]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.libraries"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
        cwd=Path(__file__).parents[2],
    )
    try:
        yield Libraries(process)
    finally:
        process.kill()
        process.communicate()


async def _serve() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        ask = getattr(LIBRARIES[asked["library"]], asked["how"])
        questions = [Question(**one) for one in asked["questions"]]
        found = await asyncio.gather(*(_answer(ask, one) for one in questions))
        answers.write(json.dumps([asdict(one) for one in found]) + "\n")
        answers.flush()


async def _answer(ask: Ask, question: Question) -> Answer:
    try:
        async with asyncio.timeout(60):
            return await ask(question)
    except Exception as error:  # noqa: BLE001 (told to the test)
        classes = [one.__name__ for one in type(error).__mro__]
        return Answer(errors=classes, message=str(error))


if __name__ == "__main__":
    asyncio.run(_serve())
