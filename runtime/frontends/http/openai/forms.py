"""The differences between the answers of chat completions and of completions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from trtc.runtime.frontends.http.openai.answers import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    Choice,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    Function,
    Message,
    ToolCall,
)
from trtc.runtime.frontends.http.openai.logprobs import (
    CompletionTexts,
    chat_logprobs,
    joined,
    prompt_logprobs,
)
from trtc.runtime.requests.completion import Completion, Result
from trtc.runtime.requests.request import FinishReason, Output, TokenLogprobs
from trtc.runtime.text.answer import AnswerPart, text_of


@dataclass(frozen=True)
class ResponseOptions:
    """Contents of an answer besides its text."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    tokens_by_id: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop: frozenset[str] = frozenset()


@dataclass(frozen=True)
class EchoedPrompt:
    """Contents of an answer about its prompt, as far as requested."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Text of the prompt, returned before the completion."""
    first_token: str = ""
    """Text of its first token, if log-probabilities of the prompt are returned."""


class Form(ABC):
    """The shape of one request's answer. Outputs arrive as (number of the prompt, Output)."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, options: ResponseOptions, n: int, prompts: Sequence[EchoedPrompt]) -> None:
        self._options = options
        self._n = n
        self._prompts = prompts
        self._begun: set[int] = set()

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def returns_generated(self) -> bool:
        """Whether generated tokens are returned and counted."""
        return True

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts whose tokens are known."""
        return sum(len(one.token_ids) for one in self._prompts)

    @abstractmethod
    def complete(self, answer: Answer, results: Sequence[Result]) -> None:
        """Add the fields of an answer besides its choices; for a stream's first chunk, `results` is
        empty."""

    @abstractmethod
    def first(self, prompt: int, index: int) -> Sequence[Choice]:
        """Chunks before the first output of a choice."""

    @abstractmethod
    def output_chunks(self, prompt: int, index: int, output: Output) -> Sequence[Choice]:
        """Chunks of an output of a choice."""

    @abstractmethod
    def whole(self, prompt: int, index: int, result: Result, completion: Completion) -> Choice:
        """A whole choice."""

    def chunks(self, prompt: int, output: Output) -> Sequence[Choice]:
        """Chunks of an output, with the chunks before the first one."""
        index = prompt * self._n + output.index
        chunks = self.output_chunks(prompt, index, output)
        if index in self._begun or not chunks:
            return chunks
        self._begun.add(index)
        return (*self.first(prompt, index), *chunks)

    def choices(self, results: Sequence[Result]) -> list[Choice]:
        """All choices, of the results of all prompts."""
        return [
            self.whole(prompt, prompt * self._n + one.index, result, one)
            for prompt, result in enumerate(results)
            for one in result.completions
        ]

    def _end(self, reason: FinishReason | None, matched: str, ids: Sequence[int]) -> dict[str, Any]:
        if reason is None:
            return {"finish_reason": None}
        stop: str | int | None = matched if matched in self._options.stop else None
        if stop is None and reason is FinishReason.STOP and ids:
            stop = ids[-1] if ids[-1] in self._options.stop_token_ids else None
        return {"finish_reason": reason.value, "stop_reason": stop}

    def _ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        return list(token_ids) if self._options.token_ids else UNSET


class ChatForm(Form):
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, options: ResponseOptions, n: int, prompts: Sequence[EchoedPrompt]) -> None:
        super().__init__(options, n, prompts)
        self._with_calls: set[int] = set()
        """Choices that have called tools."""

    def complete(self, answer: Answer, results: Sequence[Result]) -> None:
        answer.prompt_token_ids = self._ids(self._prompts[0].token_ids)
        if self._options.prompt_logprobs and results:
            answer.prompt_logprobs = prompt_logprobs(results[0].prompt_logprobs)

    def first(self, prompt: int, index: int) -> Sequence[Choice]:
        return (ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")),)

    def output_chunks(self, prompt: int, index: int, output: Output) -> Sequence[Choice]:
        chunks: list[Choice] = []
        deltas = [_delta(part) for part in output.parts]
        has_more = output.logprobs or (self._options.token_ids and output.token_ids)
        if not deltas and (output.text or has_more):
            deltas = [Delta(content=output.text)]
        for at, delta in enumerate(deltas):
            is_first = at == 0
            chunks.append(
                ChatChunkChoice(
                    index=index,
                    delta=delta,
                    logprobs=self._logprobs(output.logprobs if is_first else ()),
                    token_ids=self._ids(output.token_ids if is_first else ()),
                )
            )
        if any(part.kind == "call" for part in output.parts):
            self._with_calls.add(index)
        if output.finish_reason is not None:
            end = self._end(output.finish_reason, output.matched_stop, output.token_ids)
            _end_by_calls(end, has_calls=index in self._with_calls)
            chunks.append(ChatChunkChoice(index=index, delta=Delta(), **end))
        return chunks

    def whole(self, prompt: int, index: int, result: Result, completion: Completion) -> Choice:
        message = _message(completion)
        end = self._end(completion.finish_reason, completion.matched_stop, completion.token_ids)
        _end_by_calls(end, has_calls=message.tool_calls is not UNSET)
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(completion.logprobs),
            token_ids=self._ids(completion.token_ids),
            **end,
        )

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._options.logprobs:
            return None
        return chat_logprobs(entries, by_id=self._options.tokens_by_id)


def _call(part: AnswerPart, index: int | UnsetType = UNSET) -> ToolCall:
    if not part.id:
        return ToolCall(index=index, function=Function(arguments=part.text))
    function = Function(name=part.name, arguments=part.text)
    return ToolCall(index=index, id=part.id, type="function", function=function)


def _delta(part: AnswerPart) -> Delta:
    if part.kind == "call":
        return Delta(tool_calls=[_call(part, part.index)])
    if part.kind == "reasoning":
        return Delta(reasoning=part.text, reasoning_content=part.text)
    return Delta(content=part.text)


def _message(completion: Completion) -> Message:
    thought = text_of(completion.parts, "reasoning") or UNSET
    calls = [_call(part) for part in completion.parts if part.kind == "call"]
    return Message(
        content=completion.text or (None if calls else ""),
        reasoning=thought,
        reasoning_content=thought,
        tool_calls=calls or UNSET,
    )


def _end_by_calls(end: dict[str, Any], *, has_calls: bool) -> None:
    """Set the finish reason `tool_calls` for an answer that calls tools and ended by itself."""
    if has_calls and end["finish_reason"] == FinishReason.STOP.value:
        end["finish_reason"] = "tool_calls"


class CompletionForm(Form):
    """Args: is_echo_only: generated tokens are not returned."""

    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def __init__(
        self,
        options: ResponseOptions,
        n: int,
        prompts: Sequence[EchoedPrompt],
        *,
        is_echo_only: bool,
    ) -> None:
        super().__init__(options, n, prompts)
        self._is_echo_only = is_echo_only
        self._texts: dict[int, CompletionTexts] = {}
        self._scores: dict[int, list[TokenLogprobs]] = {}
        """Log-probabilities of the prompts, collected in a stream until the first drawn token."""

    def complete(self, answer: Answer, results: Sequence[Result]) -> None:
        """Nothing to add: the choices have all fields."""

    @property
    def returns_generated(self) -> bool:
        return not self._is_echo_only

    def first(self, prompt: int, index: int) -> Sequence[Choice]:
        echoed = self._prompts[prompt]
        if not echoed.text and not self._options.token_ids:
            return ()
        return (
            CompletionChoice(
                index=index,
                text=echoed.text,
                logprobs=self._scored(prompt, self._scores.get(prompt, ())),
                token_ids=self._ids(()),
                prompt_token_ids=self._ids(echoed.token_ids),
            ),
        )

    def output_chunks(self, prompt: int, index: int, output: Output) -> Sequence[Choice]:
        self._scores.setdefault(prompt, []).extend(output.prompt_logprobs)
        if self._is_echo_only:
            return () if output.finish_reason is None else (self._echo_end(index),)
        has_more = output.token_ids and (self._options.logprobs or self._options.token_ids)
        if not (output.text or output.finish_reason or has_more):
            return ()
        return (
            CompletionChoice(
                index=index,
                text=output.text,
                logprobs=self._logprobs(prompt, index, output.logprobs),
                token_ids=self._ids(output.token_ids),
                **self._end(output.finish_reason, output.matched_stop, output.token_ids),
            ),
        )

    def whole(self, prompt: int, index: int, result: Result, completion: Completion) -> Choice:
        echoed = self._prompts[prompt]
        drawn = () if self._is_echo_only else completion.token_ids
        end = {"finish_reason": "length"}
        if not self._is_echo_only:
            end = self._end(completion.finish_reason, completion.matched_stop, drawn)
        scores = prompt_logprobs(result.prompt_logprobs) if self._options.prompt_logprobs else UNSET
        return CompletionChoice(
            index=index,
            text=echoed.text + ("" if self._is_echo_only else completion.text),
            logprobs=self._all_logprobs(prompt, index, result, completion),
            token_ids=self._ids(drawn),
            prompt_token_ids=self._ids(echoed.token_ids),
            prompt_logprobs=scores,
            **end,
        )

    def _echo_end(self, index: int) -> Choice:
        return CompletionChoice(
            index=index, text="", token_ids=self._ids(()), finish_reason="length"
        )

    def _all_logprobs(
        self, prompt: int, index: int, result: Result, completion: Completion
    ) -> CompletionLogprobs | None:
        drawn = self._logprobs(prompt, index, () if self._is_echo_only else completion.logprobs)
        scored = self._scored(prompt, result.prompt_logprobs)
        return drawn if drawn is None or scored is None else joined(scored, drawn)

    def _scored(self, prompt: int, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs | None:
        """Log-probabilities of the prompt's tokens, if they are returned."""
        echoed = self._prompts[prompt]
        if not echoed.first_token:
            return None
        texts = CompletionTexts(by_id=self._options.tokens_by_id)
        first = texts.first(echoed.token_ids[0], echoed.first_token)
        return joined(first, texts.take(entries))

    def _logprobs(
        self, prompt: int, index: int, entries: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        if not self._options.logprobs:
            return None
        texts = self._texts.get(index)
        if texts is None:
            texts = self._texts[index] = CompletionTexts(by_id=self._options.tokens_by_id)
            texts.skip(self._prompts[prompt].text)
        return texts.take(entries)
