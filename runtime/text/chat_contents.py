"""Message contents in the form that a chat template reads: lists of parts, or plain text."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes

_SEPARATOR = "\n"
"""Between the text parts of one content, as vLLM has it."""


def with_readable_contents(
    messages: Sequence[Mapping[str, Any]], template: nodes.Template
) -> Sequence[Mapping[str, Any]]:
    """The messages; for a template that takes contents for text, their parts are joined."""
    if not any(isinstance(message["content"], list) for message in messages):
        return messages
    if _loops_over_contents(template):
        return messages
    return [{**message, "content": _text_of(message["content"])} for message in messages]


def _text_of(content: str | Sequence[Mapping[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return _SEPARATOR.join(part["text"] for part in content)


def _loops_over_contents(template: nodes.Template) -> bool:
    """Whether the template has a loop over `message.content`, or over a variable of that name."""
    return any(_is_content(loop.iter) for loop in template.find_all(nodes.For))


def _is_content(expression: nodes.Node) -> bool:
    match expression:
        case nodes.Getitem(arg=nodes.Const(value="content")) | nodes.Getattr(attr="content"):
            return True
        case nodes.Name(name="content"):
            return True
    return False
