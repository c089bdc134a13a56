"""Converts messages to the form that a chat template expects.

contents   lists of parts if the template loops over them, else one text
           None if the template tests for it, else "", because others would print None
arguments  of calls: a text if the template prints them unchanged, else an object
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from trtc.runtime.text.template_options import ARGUMENTS_TEXT

_SEPARATOR = "\n"
"""Separator of the text parts of one content, as in vLLM."""


@dataclass(frozen=True)
class MessageForm:
    """The form of messages that a template expects."""

    loops_over_contents: bool
    tests_contents_for_none: bool
    writes_arguments: bool

    def of(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Messages of a TemplateInput in this form."""
        return [self._message(one) for one in messages]

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        given = {**message, "content": self._content(message["content"])}
        if "tool_calls" in message:
            given["tool_calls"] = [self._call(one) for one in message["tool_calls"]]
        return given

    def _content(self, content: Any) -> Any:
        if content is None:
            return None if self.tests_contents_for_none else ""
        if isinstance(content, str) or self.loops_over_contents:
            return content
        return _SEPARATOR.join(part["text"] for part in content)

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = dict(call["function"])
        text = function.pop(ARGUMENTS_TEXT)
        if self.writes_arguments:
            function["arguments"] = text
        return {**call, "function": function}


def message_form(template: nodes.Template) -> MessageForm:
    """The form of messages that a parsed template expects."""
    contents, arguments = _named("content", template), _named("arguments", template)
    return MessageForm(
        loops_over_contents=any(contents(loop.iter) for loop in template.find_all(nodes.For)),
        tests_contents_for_none=_tests(template, contents, ("none",))
        or _compares_with_none(template, contents),
        writes_arguments=_writes(template, arguments)
        and not _tests(template, arguments, ("string", "mapping"))
        and not _makes_json(template, arguments),
    )


_Match = Callable[[nodes.Node], bool]


def _named(name: str, template: nodes.Template) -> _Match:
    """Whether an expression is `message.<name>`, or a variable of that name or set to it."""

    def is_attribute(expression: nodes.Node) -> bool:
        match expression:
            case nodes.Getitem(arg=nodes.Const(value=value)):
                return bool(value == name)
            case nodes.Getattr(attr=attribute):
                return bool(attribute == name)
        return False

    variables = {name} | {
        one.target.name
        for one in template.find_all(nodes.Assign)
        if isinstance(one.target, nodes.Name) and is_attribute(one.node)
    }

    def match(expression: nodes.Node) -> bool:
        if isinstance(expression, nodes.Name):
            return expression.name in variables
        return is_attribute(expression)

    return match


def _tests(template: nodes.Template, match: _Match, tests: Sequence[str]) -> bool:
    return any(one.name in tests and match(one.node) for one in template.find_all(nodes.Test))


def _compares_with_none(template: nodes.Template, match: _Match) -> bool:
    return any(
        match(one.expr) and any(_is_none(operand.expr) for operand in one.ops)
        for one in template.find_all(nodes.Compare)
    )


def _is_none(expression: nodes.Node) -> bool:
    return isinstance(expression, nodes.Const) and expression.value is None


def _makes_json(template: nodes.Template, match: _Match) -> bool:
    """Whether the template converts it to text by `tojson`, to print it later by the same name."""
    return any(
        one.name == "tojson" and one.node is not None and match(one.node)
        for one in template.find_all(nodes.Filter)
    )


def _writes(template: nodes.Template, match: _Match) -> bool:
    """Whether the template prints it unchanged: not through a filter, an attribute or a call."""
    kinds = (nodes.Output, nodes.Add, nodes.Concat)
    return any(match(child) for one in template.find_all(kinds) for child in one.iter_child_nodes())
