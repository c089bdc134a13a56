"""Whether an answer calls tools, and which: `tool_choice` in the shapes of the OpenAI API."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from trtc.protos.errors import InvalidRequestError

MAX_TOOLS = 512
"""Most tools of one request."""

ToolMode = Literal["none", "auto", "required"]


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether an answer calls tools, and which.

    ========================  ==================================
    OpenAI's `tool_choice`    here
    ========================  ==================================
    none, auto, required      the mode of that name
    a function                required, of one name
    allowed_tools             its mode, of several names
    ========================  ==================================
    """

    mode: ToolMode = "auto"
    """none: it calls none. auto: it may. required: it calls at least one."""
    names: tuple[str, ...] = ()
    """Names of the tools that the answer may call; (): all."""


AUTO = ToolChoice()


def tool_choice(value: Any, field: str = "tool_choice") -> ToolChoice | None:
    """Parse `tool_choice` in a shape of the OpenAI API, of chat completions or of responses; None
    for None.

    Raises:
        InvalidRequestError: it has another shape.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return ToolChoice(_mode(value, field, get_args(ToolMode)))
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "function":
        return ToolChoice("required", (_named(value, field),))
    if kind == "allowed_tools":
        return _allowed(value, field)
    raise refused(
        "has no type that is known" if isinstance(value, Mapping) else kind_of(value),
        field,
        "Give none, auto, required, a function by its name, or allowed_tools",
    )


def _allowed(value: Mapping[str, Any], field: str) -> ToolChoice:
    given = value.get("allowed_tools", value)
    if given is not value:
        field = f"{field}.allowed_tools"
    if not isinstance(given, Mapping):
        raise refused(kind_of(given), field, "Give a mode and tools")
    tools = given.get("tools")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise refused(
            "is no list of tools", f"{field}.tools", f"Give a list of 1 to {MAX_TOOLS} tools"
        )
    names = tuple(_named(one, f"{field}.tools[{at}]") for at, one in enumerate(tools))
    mode = _mode(given.get("mode", "auto"), f"{field}.mode", ("auto", "required"))
    return ToolChoice(mode, names)


def _named(value: Any, field: str) -> str:
    """The name of `{"function": {"name": ...}}`, or of `{"name": ...}`."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise refused("names no function", field, "Give the name of a tool")
    return name


def _mode(value: Any, field: str, modes: Sequence[str]) -> Any:
    if value not in modes:
        raise refused(f"is {str(value)[:40]!r}", field, f"Give {', '.join(modes)}")
    return value


def kind_of(value: object) -> str:
    """An error's problem: the value has the wrong type."""
    return f"is a {type(value).__name__}"


def refused(problem: str, field: str, remedy: str) -> InvalidRequestError:
    """An error of a request's tools, or of its choice of them."""
    return InvalidRequestError(problem, field=field, remedy=remedy)
