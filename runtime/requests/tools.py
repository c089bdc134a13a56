"""Tools that an answer may call: their parameters, and which of them it may or must call."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from trtc.runtime.requests.tool_choice import AUTO, MAX_TOOLS, ToolChoice, kind_of, refused
from trtc.runtime.text.chat import Chat, parse_json

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Tool(msgspec.Struct, frozen=True):
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: str = ""
    """JSON schema, as text, of its arguments, which are an object; "": none is given."""
    strict: bool = False
    """Whether arguments must match the schema."""


class ToolUse(msgspec.Struct, frozen=True):
    """The tools of a request."""

    tools: tuple[Tool, ...]
    """All tools in the prompt; their names are unique."""
    choice: ToolChoice
    """Its mode is auto or required."""
    parallel: bool = True
    """Whether an answer may have several calls."""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        names = self.choice.names
        return tuple(one for one in self.tools if not names or one.name in names)


def tool_use(
    chat: Chat | None, choice: ToolChoice = AUTO, *, parallel: bool = True
) -> ToolUse | None:
    """The tools of a request; None: its answer can call none.

    If a single named tool is required, it is called exactly once, as in vLLM: clients that name one
    read one call, and a model may not stop by itself.

    Args:
        chat: its `tools` are functions in the shape of the OpenAI API.

    Raises:
        InvalidRequestError: a tool has another shape, or the choice names an unknown tool.
    """
    tools, field = "" if chat is None else chat.tools, "chat.tools"
    listed = _tools(parse_json(tools, field, list), field) if tools else ()
    if not listed:
        if choice.mode == "required" or choice.names:
            raise refused("is given without tools", "tool_choice", "Give tools, or leave it out")
        return None
    known = {one.name for one in listed}
    for name in choice.names:
        if name not in known:
            raise refused(
                f"names {name[:40]!r}, which is not among the tools",
                "tool_choice",
                "Give the name of a tool of this request",
            )
    if choice.mode == "none":
        return None
    is_named = choice.mode == "required" and len(choice.names) == 1
    return ToolUse(listed, choice, parallel and not is_named)


def shown(chat: Chat, choice: ToolChoice) -> Chat:
    """The conversation for the chat template: without tools that the model must not call."""
    return replace(chat, tools="") if choice.mode == "none" and chat.tools else chat


def _tools(values: Sequence[Any], field: str) -> tuple[Tool, ...]:
    if len(values) > MAX_TOOLS:
        raise refused(f"has {len(values)} tools", field, f"Give at most {MAX_TOOLS}")
    tools = tuple(_tool(value, f"{field}[{at}]") for at, value in enumerate(values))
    seen: set[str] = set()
    for at, tool in enumerate(tools):
        if tool.name in seen:
            raise refused(
                f"{tool.name!r} is given twice", f"{field}[{at}]", "Give every tool its own name"
            )
        seen.add(tool.name)
    return tools


def _tool(value: Any, field: str) -> Tool:
    """Parse `{"type": "function", "function": {...}}`, or the function alone, which templates
    accept as well."""
    if not isinstance(value, Mapping):
        raise refused("is not an object", field, "Give a list of JSON objects")
    kind = value.get("type")
    if kind not in (None, "function"):
        raise refused(
            f"{str(kind)[:40]!r} is not supported",
            f"{field}.type",
            "Give tools of type function: the server runs none itself",
        )
    function = value
    if "function" in value:
        function, field = value["function"], f"{field}.function"
        if not isinstance(function, Mapping):
            raise refused(kind_of(function), field, "Give an object with a name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problem = "is missing" if name is None else f"is {str(name)[:40]!r}"
        raise refused(
            problem, f"{field}.name", "Give 1 to 128 letters, digits, underscores, dots or hyphens"
        )
    parameters = _of_type(function, "parameters", Mapping, field, "Give a JSON schema of an object")
    return Tool(
        name=name,
        description=_of_type(function, "description", str, field, "Give a text") or "",
        parameters="" if parameters is None else msgspec.json.encode(parameters).decode(),
        strict=_of_type(function, "strict", bool, field, "Give true or false") or False,
    )


def _of_type(function: Mapping[str, Any], name: str, kind: type, field: str, remedy: str) -> Any:
    value = function.get(name)
    if value is not None and not isinstance(value, kind):
        raise refused(kind_of(value), f"{field}.{name}", remedy)
    return value
