"""A conversation as its caller gives it, and its conversion to inputs of the chat template.

Structured parts (tools, documents, arguments, template variables) are passed as JSON text, which
preserves numbers and the order of keys in every protocol. They are parsed here, once, with limits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.text.template_options import ARGUMENTS_TEXT, SPECIAL_TOKENS

MAX_JSON_BYTES = 1 << 19
"""Most bytes of one JSON text."""
MAX_JSON_DEPTH = 32
"""Most levels of lists and objects in one JSON text."""
MAX_TEMPLATE_KWARGS = 64
MAX_MESSAGE_ITEMS = 256
"""Most parts, or tool calls, of one message."""
RESERVED_NAMES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "raise_exception",
        "strftime_now",
        *SPECIAL_TOKENS,
    }
)
"""Template variables that the renderer sets."""


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    text: str
    type: str = "text"
    """Only text is supported; other types are refused by name."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant made."""

    name: str
    arguments: str = "{}"
    """A JSON object. Templates that print it unchanged get this text, others the object."""
    id: str = ""
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    """`system`, `developer`, `user`, `assistant`, `tool`, or another that the template knows."""
    content: str | None = ""
    """None: the message has no content, for example if the assistant only calls tools."""
    parts: tuple[ContentPart, ...] = ()
    """Instead of `content`."""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """For a tool's message, the id of the call that it answers."""
    reasoning_content: str = ""


class TemplateInput(msgspec.Struct, frozen=True):
    """A conversation as chat templates expect it."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    continue_final_message: bool = False
    """The prompt ends inside the last message, which the model continues."""


@dataclass(frozen=True)
class Chat:
    """Messages, oldest first, and the other inputs of the template."""

    messages: tuple[ChatMessage, ...]
    tools: str = ""
    """JSON: a list of tool schemas; "": none."""
    documents: str = ""
    """JSON: a list of objects; "": none."""
    template_kwargs: str = ""
    """JSON: an object of further template variables, such as `enable_thinking`; "": none."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the head of the assistant's next message; None: it does unless
    `continue_final_message` is set."""
    continue_final_message: bool = False

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all inputs of the template."""
        return sum(len(text.encode(errors="surrogatepass")) for text in self._texts())

    def template_input(self) -> TemplateInput:
        """The inputs of the template; raises InvalidRequestError, which names the field."""
        if not self.messages:
            raise _refused("has no messages", "chat.messages", "Give at least one")
        adds_prompt = self.add_generation_prompt
        if adds_prompt is None:
            adds_prompt = not self.continue_final_message
        elif adds_prompt and self.continue_final_message:
            raise _refused(
                "is given beside add_generation_prompt",
                "chat.continue_final_message",
                "A prompt ends inside the last message, or with the head of the next: give one",
            )
        return TemplateInput(
            messages=[
                _template_message(message, f"chat.messages[{at}]")
                for at, message in enumerate(self.messages)
            ],
            variables={
                **_template_kwargs(self.template_kwargs),
                # None, not undefined: templates are written for Transformers, which sets them.
                "tools": _shown_tools(_objects(self.tools, "chat.tools")),
                "documents": _objects(self.documents, "chat.documents"),
                "add_generation_prompt": adds_prompt,
            },
            continue_final_message=self.continue_final_message,
        )

    def _texts(self) -> Iterator[str]:
        yield from (self.tools, self.documents, self.template_kwargs)
        for message in self.messages:
            yield from (message.role, message.content or "", message.name)
            yield from (message.tool_call_id, message.reasoning_content)
            for part in message.parts:
                yield from (part.type, part.text)
            for call in message.tool_calls:
                yield from (call.id, call.type, call.name, call.arguments)


def _template_message(message: ChatMessage, field: str) -> dict[str, Any]:
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        if message.content:
            raise _refused("is given beside content", f"{field}.parts", "Give one of them")
        given["content"] = [
            _template_part(part, f"{field}.parts[{at}]") for at, part in enumerate(message.parts)
        ]
    if message.name:
        given["name"] = message.name
    if message.tool_calls:
        given["tool_calls"] = [
            _template_call(call, f"{field}.tool_calls[{at}]")
            for at, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        given["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        # Under both names that templates read it by.
        given["reasoning_content"] = given["thinking"] = message.reasoning_content
    return given


def _template_part(part: ContentPart, field: str) -> dict[str, str]:
    if part.type != "text":
        raise _refused(
            f"{part.type[:40]!r} is not supported",
            f"{field}.type",
            "Give parts of type text: the model reads nothing else",
        )
    return {"type": "text", "text": part.text}


def _template_call(call: ToolCall, field: str) -> dict[str, Any]:
    """A call with its arguments as an object, as templates expect."""
    if call.type != "function":
        raise _refused(f"is {call.type[:40]!r}", f"{field}.type", 'Give "function"')
    if not call.name:
        raise _refused("is missing", f"{field}.function.name", "Name the function")
    text = call.arguments or "{}"
    arguments = parse_json(text, f"{field}.function.arguments", dict)
    given: dict[str, Any] = {"id": call.id} if call.id else {}
    function = {"name": call.name, "arguments": arguments, ARGUMENTS_TEXT: text}
    return {**given, "type": "function", "function": function}


def _shown_tools(tools: list[Any] | None) -> list[Any] | None:
    """Tools in the shape of chat completions, which templates expect, without `strict`, which is
    only for the server."""
    return None if tools is None else [_shown_tool(one) for one in tools]


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if isinstance(tool.get("function"), dict):
        function = {name: value for name, value in tool["function"].items() if name != "strict"}
        return {**tool, "function": function}
    if tool.get("type") != "function":
        return tool
    named = ("name", "description", "parameters")
    function = {name: tool[name] for name in named if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _objects(text: str, field: str) -> list[Any] | None:
    """A list of objects; None if there is no text, or the list is empty."""
    if not text:
        return None
    values: list[Any] = parse_json(text, field, list)
    for at, value in enumerate(values):
        if not isinstance(value, dict):
            raise _refused("is not an object", f"{field}[{at}]", "Give a list of JSON objects")
    return values or None


def _template_kwargs(text: str) -> Mapping[str, Any]:
    if not text:
        return {}
    field = "chat.template_kwargs"
    kwargs: dict[str, Any] = parse_json(text, field, dict)
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise _refused(f"has {len(kwargs)} names", field, f"Give at most {MAX_TEMPLATE_KWARGS}")
    for name in kwargs:
        if name in RESERVED_NAMES:
            raise _refused(f"{name} is set by the renderer", field, "Leave it out")
        if not name.isidentifier() or name.startswith("_") or len(name) > 100:
            raise _refused(
                f"{name[:40]!r} is not the name of a template variable",
                field,
                "Give names of letters, digits and underscores",
            )
    return kwargs


def parse_json(text: str, field: str, kind: type) -> Any:
    """The value of a JSON text from a caller.

    Args:
        kind: list or dict, which the value must be.

    Raises:
        InvalidRequestError: the text is too long or too deep, no JSON, or of another kind.
    """
    noun = "a JSON object" if kind is dict else "a JSON list"
    if len(text) > MAX_JSON_BYTES or len(text.encode(errors="surrogatepass")) > MAX_JSON_BYTES:
        raise _refused(f"has {len(text)} characters", field, f"At most {MAX_JSON_BYTES} bytes")
    too_deep = _refused(
        "is nested too deeply", field, f"Nest lists and objects at most {MAX_JSON_DEPTH} deep"
    )
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise _refused(f"is not JSON ({error})", field, f"Give {noun}") from error
    except RecursionError:
        raise too_deep from None
    if not isinstance(value, kind):
        raise _refused("is another kind of JSON", field, f"Give {noun}")
    if not _is_within_depth(value):
        raise too_deep
    return value


def _is_within_depth(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        nested = [
            child
            for one in level
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, dict | list)
        ]
        if not nested:
            return True
        level = nested
    return False


def _refused(problem: str, field: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(problem, field=field, remedy=remedy)
