"""The keyword arguments of `generate` and `chat`: the same in this process and for both clients."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.draft import ChatMessage, RequestDraft
from trtc.runtime.request import SamplingParams


class GenerateOptions(TypedDict, total=False):
    """All optional; the defaults are those of RequestDraft and SamplingParams."""

    model: str
    request_id: str
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    n: int
    logprobs: int | None
    priority: int


_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


def draft_of_prompt(prompt: str | Sequence[int], options: GenerateOptions) -> RequestDraft:
    """A draft for a text, or for the token ids of one."""
    if isinstance(prompt, str):
        return RequestDraft(text=prompt, **_draft_fields(options))
    return RequestDraft(token_ids=tuple(prompt), **_draft_fields(options))


def draft_of_chat(messages: Sequence[Mapping[str, str]], options: GenerateOptions) -> RequestDraft:
    """A draft for a conversation of `{"role": ..., "content": ...}` messages."""
    return RequestDraft(chat=chat_messages(messages), **_draft_fields(options))


def chat_messages(messages: Sequence[Mapping[str, str]]) -> tuple[ChatMessage, ...]:
    """Raises InvalidRequestError for a message that is not exactly a role and a content."""
    for position, message in enumerate(messages):
        if set(message) != {"role", "content"}:
            raise InvalidRequestError(
                f"has the keys {sorted(message)}",
                field=f"chat.messages[{position}]",
                remedy='Give each message a "role" and a "content"',
            )
    return tuple(ChatMessage(one["role"], one["content"]) for one in messages)


def _draft_fields(options: GenerateOptions) -> dict[str, Any]:
    """RequestDraft's keyword arguments; the client draws the id, so that it can abort by it."""
    given: dict[str, Any] = dict(options)
    sampling = {name: given.pop(name) for name in list(given) if name in _SAMPLING}
    stop = given.pop("stop", ())
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    given["stop_token_ids"] = tuple(given.pop("stop_token_ids", ()))
    given["request_id"] = given.pop("request_id", "") or uuid.uuid4().hex
    return {"sampling": SamplingParams(**sampling), **given}
