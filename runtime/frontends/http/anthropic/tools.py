"""Fields of a message for its tools, the choice of them, and reasoning."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.requests.tool_choice import AUTO, ToolChoice, ToolMode
from trtc.runtime.text.reasoning import reasoning_variables


class Choice(msgspec.Struct, kw_only=True):
    """`tool_choice` of a message. None: not given."""

    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool | None = None
    name: str | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """`thinking` of a message. None: not given."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


_MODES: Mapping[str, ToolMode] = {"auto": "auto", "any": "required", "none": "none"}


def functions_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in the shape of the OpenAI API.

    Raises:
        InvalidRequestError: a tool runs at Anthropic, or has no schema.
    """
    return [_function(one, f"tools[{at}]") for at, one in enumerate(tools)]


def _function(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequestError(
            f"{str(kind)[:40]!r} is not supported",
            field=f"{field}.type",
            remedy="Give tools of type custom: those of other types run at Anthropic",
        )
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(
            "is missing" if schema is None else f"is a {type(schema).__name__}",
            field=f"{field}.input_schema",
            remedy="Give a JSON schema of an object",
        )
    named = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    strict = {"strict": tool["strict"]} if tool.get("strict") is not None else {}
    return {"type": "function", **named, "parameters": schema, **strict}


def choice_of(given: Choice | None) -> ToolChoice:
    """The choice of tools.

    Raises:
        InvalidRequestError: the choice is a tool without a name.
    """
    if given is None:
        return AUTO
    if given.type != "tool":
        return ToolChoice(_MODES[given.type])
    if given.name is None:
        raise InvalidRequestError("is missing", field="tool_choice.name", remedy="Name the tool")
    return ToolChoice("required", (given.name,))


def variables_of(thinking: Thinking | None, effort: str | None) -> dict[str, Any]:
    """Variables of the chat template; without an effort if thinking is disabled.

    Raises:
        InvalidRequestError: the effort is unknown.
    """
    field = "output_config.effort"
    if thinking is None:
        return reasoning_variables(None, effort, field)
    if thinking.type == "disabled":
        return reasoning_variables(False, None)
    return reasoning_variables(True, effort, field)


def budget_of(thinking: Thinking | None, max_tokens: int) -> int | None:
    """Most reasoning tokens; None: no limit.

    Raises:
        InvalidRequestError: thinking is enabled and the budget is missing, not positive, or not
            less than `max_tokens`.
    """
    if thinking is None or thinking.type != "enabled":
        return None
    budget = thinking.budget_tokens
    if budget is None or not 1 <= budget < max_tokens:
        raise InvalidRequestError(
            "is missing" if budget is None else f"is {budget}",
            field="thinking.budget_tokens",
            remedy="Give at least 1, and less than max_tokens",
        )
    return budget
