"""Converts Ollama's fields to request inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.bodies import Given, read
from trtc.runtime.frontends.http.logprobs import asked_logprobs
from trtc.runtime.frontends.http.messages import chat_messages
from trtc.runtime.frontends.http.ollama.fields import (
    AskFields,
    ChatFields,
    GenerateFields,
    Options,
)
from trtc.runtime.frontends.http.sampling import sampling_of
from trtc.runtime.requests.grammar import Grammar, schema_or_name
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.text.chat import Chat
from trtc.runtime.text.chat_options import chat_of
from trtc.runtime.text.template_options import TemplateOptions

OPTION_NAMES: Mapping[str, str] = dict(
    zip(Options.__struct_fields__, Options.__struct_encode_fields__, strict=True)
)
"""Sampling parameter -> Ollama's name."""
_OPTION_PARAMS = {name: f"options.{sent_as}" for name, sent_as in OPTION_NAMES.items()} | {
    "max_tokens": "options.num_predict"
}
CHAT: Mapping[str, str] = {
    **_OPTION_PARAMS,
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "prompt": "messages",
    "prompt_ids": "messages",
    "logprobs": "top_logprobs",
    "reasoning_effort": "think",
}
"""Field of a request input -> its name in the request (`requests.naming`)."""
GENERATE: Mapping[str, str] = {
    **CHAT,
    **dict.fromkeys(("chat", "chat.messages", "prompt", "prompt_ids", "messages"), "prompt"),
    "text": "prompt",
    "prompt.text": "prompt",
}
_RENAMED = {"tool_name": "name", "thinking": "reasoning_content"}

FieldsT = TypeVar("FieldsT", bound=AskFields)


@dataclass(frozen=True)
class ParsedRequest(Generic[FieldsT]):
    """A parsed body."""

    given: Given[FieldsT]
    """Its fields; `ignored` includes those of `options`."""
    request_input: RequestInput | None
    """None: the request only loads the model."""
    plain_prompt: str = ""
    """The prompt's text, for a model without a chat template."""


def read_chat(body: bytes, request_id: str) -> ParsedRequest[ChatFields]:
    """Parse a request for `/api/chat`.

    Raises:
        InvalidRequestError: names the field that is wrong.
    """
    given = read(body, ChatFields)
    given, options = _with_options(given)
    if not given.fields.messages:
        return ParsedRequest(given, None)
    messages = chat_messages([_message(one, at) for at, one in enumerate(given.fields.messages)])
    with fields_as_sent(CHAT):
        chat = chat_of(
            messages, {"tools": given.fields.tools or (), **_template_options(given.fields)}
        )
    return ParsedRequest(given, _input(given.fields, options, request_id, chat=chat))


def read_generate(body: bytes, request_id: str) -> ParsedRequest[GenerateFields]:
    """Parse a request for `/api/generate`, whose prompt is a user's message unless it is `raw`.

    Raises:
        InvalidRequestError: names the field that is wrong.
    """
    given = read(body, GenerateFields)
    given, options = _with_options(given)
    fields = given.fields
    if not fields.prompt and not fields.system:
        return ParsedRequest(given, None)
    prompt = fields.prompt or ""
    if fields.raw:
        if fields.system:
            raise InvalidRequestError(
                "is given beside raw", field="system", remedy="Write it into the prompt"
            )
        return ParsedRequest(given, _input(fields, options, request_id, text=prompt))
    messages = [{"role": "user", "content": prompt}]
    if fields.system:
        messages.insert(0, {"role": "system", "content": fields.system})
    with fields_as_sent(CHAT):
        chat = chat_of(messages, _template_options(fields))
    request_input = _input(fields, options, request_id, chat=chat)
    return ParsedRequest(given, request_input, "" if fields.system else prompt)


def _with_options(given: Given[FieldsT]) -> tuple[Given[FieldsT], Options]:
    raw = bytes(given.fields.options)
    if raw == b"null":
        return given, Options()
    options = read(raw, Options, within="options.")
    return Given(given.fields, (*given.ignored, *options.ignored)), options.fields


def _input(
    fields: AskFields,
    options: Options,
    request_id: str,
    *,
    text: str | None = None,
    chat: Chat | None = None,
) -> RequestInput:
    limit, stop = options.num_predict, options.stop
    return RequestInput(
        text=text,
        chat=chat,
        model=fields.model or "",
        request_id=request_id,
        sampling=sampling_of(_drawn_seed(options)),
        max_tokens=None if limit is None or limit < 0 else limit,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=asked_logprobs(fields.logprobs, fields.top_logprobs),
        grammar=_format(fields.format),
        splits_answer=chat is not None,
    )


def _format(raw: msgspec.Raw) -> Grammar | None:
    """The grammar of `format`; an empty text means none."""
    given = bytes(raw)
    if given in (b"null", b'""'):
        return None
    if given == b'"json"':
        return Grammar("json_object", sent_as="format")
    return schema_or_name(given.decode(), "format")


def _drawn_seed(options: Options) -> Options:
    """Options without a seed of -1, by which Ollama's clients ask for a random one."""
    if options.seed == -1:
        options.seed = None
    return options


def _template_options(fields: AskFields) -> TemplateOptions:
    """Template options for reasoning."""
    if isinstance(fields.think, str):
        return {"reasoning_effort": fields.think}
    return {"enable_thinking": fields.think}


def _message(message: Mapping[str, Any], at: int) -> Mapping[str, Any]:
    """A message in the shape of the OpenAI API."""
    images: Sequence[Any] | None = message.get("images")
    if images:
        raise InvalidRequestError(
            "is not supported by this server", field=f"messages[{at}].images", remedy="Leave it out"
        )
    for name in _RENAMED.keys() & message.keys():
        if not isinstance(message[name], str | None):
            raise InvalidRequestError(
                f"is a {type(message[name]).__name__}",
                field=f"messages[{at}].{name}",
                remedy="Give a text",
            )
    given = {_RENAMED.get(name, name): value for name, value in message.items() if name != "images"}
    if given.get("tool_calls") and given.get("content") == "":
        given["content"] = None  # as in OpenAI's API
    return given
