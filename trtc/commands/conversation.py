"""Which conversation the options of `generate` and `client` describe, if any."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trtc.protos.errors import RequestError
from trtc.runtime.text.template_options import Message, TemplateOptions


class Conversation(msgspec.Struct, frozen=True):
    messages: Sequence[Message]
    template: TemplateOptions = {}


def read_conversation(
    prompt: object,
    *,
    chat: bool,
    system: str | None,
    tools: str | None,
    template_kwargs: str | None,
) -> Conversation | None:
    """A conversation; None: the prompt is to be completed as it is.

    Args:
        prompt: a text, token ids, or the messages of --messages.
        tools, template_kwargs: JSON.

    Raises:
        RequestError: the options contradict each other, or a text is not JSON.
    """
    if isinstance(prompt, Messages):
        if chat or system is not None:
            raise RequestError("has them itself", field="--messages", remedy="Give no --chat")
        messages: Sequence[Message] = prompt.messages
    elif chat:
        messages = _of_text(prompt, system)
    else:
        needless = {"--system": system, "--tools": tools, "--chat-template-kwargs": template_kwargs}
        for option, value in needless.items():
            if value is not None:
                raise RequestError("needs --chat", field=option)
        return None
    template = TemplateOptions()
    if tools is not None:
        template["tools"] = read_json("--tools", tools, list)
    if template_kwargs is not None:
        template["chat_template_kwargs"] = read_json(
            "--chat-template-kwargs", template_kwargs, dict
        )
    return Conversation(messages, template)


class Messages(msgspec.Struct, frozen=True):
    """What --messages holds."""

    messages: Sequence[Mapping[str, Any]]


def read_messages(text: str | None) -> Messages | None:
    """Raises RequestError: the text is no JSON list."""
    return None if text is None else Messages(read_json("--messages", text, list))


def read_json(option: str, text: str, kind: type) -> Any:
    """The value of an option's JSON text, a list or a dict.

    Raises:
        RequestError: it is no JSON, or of another kind.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"is not JSON ({error})", field=option) from error
    if not isinstance(value, kind):
        raise RequestError(
            "is another kind of JSON",
            field=option,
            remedy="Give a list" if kind is list else "Give an object",
        )
    return value


def _of_text(prompt: object, system: str | None) -> list[Message]:
    if not isinstance(prompt, str):
        raise RequestError("needs a text", field="--chat", remedy="Give --prompt or --prompt-file")
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]
