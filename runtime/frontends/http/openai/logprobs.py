"""Log-probabilities in the shapes of chat completions, of completions, and of vLLM's prompts."""

from collections.abc import Sequence

from trtc.runtime.frontends.http.logprobs import finite, logprob_entries, token_name
from trtc.runtime.frontends.http.openai.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
)
from trtc.runtime.requests.request import TokenLogprobs


def chat_logprobs(entries: Sequence[TokenLogprobs], *, by_id: bool) -> ChatLogprobs:
    """Log-probabilities of a chat completion. Args: by_id: as in `logprob_entries`."""
    return ChatLogprobs(logprob_entries(entries, by_id=by_id))


class CompletionTexts:
    """The tokens of one choice of a completion, in order, with their offsets in its text."""

    def __init__(self, *, by_id: bool) -> None:
        self._by_id = by_id
        self._offset = 0

    def skip(self, text: str) -> None:
        """Advance over text before the next token."""
        self._offset += len(text)

    def first(self, token_id: int, text: str) -> CompletionLogprobs:
        """Entry of the prompt's first token, which has no probability."""
        logprobs = CompletionLogprobs(
            [token_name(token_id, text, self._by_id)], [None], [None], [0]
        )
        self.skip(text)
        return logprobs

    def take(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Entries of the next tokens."""
        logprobs = CompletionLogprobs([], [], [], [])
        for one in entries:
            logprobs.tokens.append(token_name(one.token_id, one.text, self._by_id))
            logprobs.token_logprobs.append(finite(one.logprob))
            logprobs.top_logprobs.append(_top(one, by_id=self._by_id))
            logprobs.text_offset.append(self._offset)
            self._offset += len(one.text)
        return logprobs


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(entries: Sequence[TokenLogprobs]) -> list[dict[int, PromptLogprob] | None]:
    """vLLM's list with an entry for each token of the prompt; None for the first."""
    return [None, *(_at_place(one) for one in entries)]


def _at_place(one: TokenLogprobs) -> dict[int, PromptLogprob]:
    logprobs = {one.token_id: PromptLogprob(finite(one.logprob), None, one.text)}
    for rank, ((token, value), text) in enumerate(zip(one.top, one.top_texts, strict=True), 1):
        logprobs[token] = PromptLogprob(finite(value), rank, text)
    return logprobs


def _top(one: TokenLogprobs, *, by_id: bool) -> dict[str, float] | None:
    """The most likely tokens and the token itself; None if only the token was requested."""
    if not one.top:
        return None
    logprobs = {
        token_name(token, text, by_id): finite(value)
        for (token, value), text in zip(one.top, one.top_texts, strict=True)
    }
    logprobs.setdefault(token_name(one.token_id, one.text, by_id), finite(one.logprob))
    return logprobs
