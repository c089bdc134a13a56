"""Log-probabilities in the shapes of chat completions, of completions, and of vLLM's prompts."""

from collections.abc import Sequence

from trtc.runtime.frontends.http.openai.answers import (
    ChatLogprobs,
    ChosenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    ToldLogprob,
)
from trtc.runtime.requests.request import TokenLogprobs

LEAST = -9999.0
"""JSON has no infinity: what a token that cannot be drawn is told to have."""


def chat_logprobs(entries: Sequence[TokenLogprobs], *, by_id: bool) -> ChatLogprobs:
    """Args: by_id: whether tokens are named `token_id:N`, which names every token exactly."""
    return ChatLogprobs(
        [
            ChosenLogprob(
                token=_name(one.token_id, one.text, by_id),
                logprob=_finite(one.logprob),
                bytes=list(one.utf8),
                top_logprobs=[
                    ToldLogprob(
                        _name(token, utf8.decode(errors="replace"), by_id),
                        _finite(value),
                        list(utf8),
                    )
                    for (token, value), utf8 in zip(one.top, one.top_utf8, strict=True)
                ],
            )
            for one in entries
        ]
    )


class CompletionTexts:
    """The tokens of one choice of a completion, in order, with their places in its text."""

    def __init__(self, *, by_id: bool) -> None:
        self._by_id = by_id
        self._offset = 0

    def skip(self, text: str) -> None:
        """The text has this before the next token."""
        self._offset += len(text)

    def first(self, token_id: int, text: str) -> CompletionLogprobs:
        """The first token of the prompt, which has no probability."""
        told = CompletionLogprobs([_name(token_id, text, self._by_id)], [None], [None], [0])
        self.skip(text)
        return told

    def take(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The next tokens."""
        told = CompletionLogprobs([], [], [], [])
        for one in entries:
            told.tokens.append(_name(one.token_id, one.text, self._by_id))
            told.token_logprobs.append(_finite(one.logprob))
            told.top_logprobs.append(_top(one, by_id=self._by_id))
            told.text_offset.append(self._offset)
            self._offset += len(one.text)
        return told


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(entries: Sequence[TokenLogprobs]) -> list[dict[int, PromptLogprob] | None]:
    """vLLM's: of each token of the prompt; the first has none."""
    return [None, *(_at_place(one) for one in entries)]


def _at_place(one: TokenLogprobs) -> dict[int, PromptLogprob]:
    told = {one.token_id: PromptLogprob(_finite(one.logprob), None, one.text)}
    for rank, ((token, value), text) in enumerate(zip(one.top, one.top_texts, strict=True), 1):
        told[token] = PromptLogprob(_finite(value), rank, text)
    return told


def _top(one: TokenLogprobs, *, by_id: bool) -> dict[str, float] | None:
    """The likeliest and the token itself; None where only the token was asked for."""
    if not one.top:
        return None
    told = {
        _name(token, text, by_id): _finite(value)
        for (token, value), text in zip(one.top, one.top_texts, strict=True)
    }
    told.setdefault(_name(one.token_id, one.text, by_id), _finite(one.logprob))
    return told


def _name(token_id: int, text: str, by_id: bool) -> str:
    return f"token_id:{token_id}" if by_id else text


def _finite(value: float) -> float:
    return max(value, LEAST)
