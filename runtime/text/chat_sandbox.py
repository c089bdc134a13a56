"""Renders a chat template, a program of the checkpoint's author, inside a limited process.

Jinja's sandbox blocks access to Python's internals; the limits of the process bound its time and
memory, which a sandbox inside an interpreter cannot. See `chat_workers`.
"""

import json
import pprint  # noqa: F401
import textwrap  # noqa: F401
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

# Jinja would import these, and two modules above, when no file can be opened any more.
import jinja2.constants
import jinja2.debug  # noqa: F401
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trtc.runtime.host.limited_child import Message, Work, serve
from trtc.runtime.text.chat_contents import message_form

_MAX_PROBLEM_CHARACTERS = 300
_SAMPLE = """
{%- macro shown(text) %}{{ text | trim | tojson(indent=2) }}{% endmacro %}
{%- for message in messages %}{{ shown(message.content) + '\\n' + strftime_now("%d %b %Y") }}
{%- endfor %}{{ raise_exception("é") }}
"""


def main() -> None:
    _warm_up()
    serve(set_up)


def _warm_up() -> None:
    """Trigger all lazy imports and reads now, because later no file can be opened."""
    time.tzset()
    first = {"source": _SAMPLE, "special_tokens": {}, "max_characters": 1000}
    answer, work = set_up(first)
    messages = [{"role": "user", "content": [{"type": "text", "text": "é"}]}]
    assert answer == {"status": "ok"}
    work({"messages": messages, "variables": {}})


def set_up(request: Message) -> tuple[Message, Work]:
    """Compile `source`; render it with `special_tokens`, at most `max_characters` of text."""
    environment = _environment()
    try:
        tree = environment.parse(request["source"])
        template = environment.from_string(tree)
    except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
        failure = _failed("unusable", error)
        return failure, lambda _: failure

    form = message_form(tree)

    def render(chat: Message) -> Message:
        messages = form.of(chat["messages"])
        variables = {**chat["variables"], **request["special_tokens"], "messages": messages}
        return _render(template, variables, request["max_characters"])

    return {"status": "ok"}, render


def _render(template: Template, variables: Mapping[str, Any], max_characters: int) -> Message:
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(variables):
            length += len(piece)
            if length > max_characters:
                return {"status": "size"}
            pieces.append(piece)
    except MemoryError:
        raise
    # Any exception of the template is an error of its input.
    except Exception as error:  # noqa: BLE001
        return _failed("refused", error)
    return {"status": "ok", "text": "".join(pieces)}


def _failed(status: str, error: Exception) -> Message:
    """The error in one line of bounded length, because its text comes from the template."""
    text = str(error) or type(error).__name__
    problem = " ".join(text[: 2 * _MAX_PROBLEM_CHARACTERS].split())
    return {"status": status, "problem": problem[:_MAX_PROBLEM_CHARACTERS]}


def _environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment, as in Transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    environment.filters["tojson"] = _to_json
    return environment


class _Dict:
    """`dict` in templates: its two constructors, without access to Python's class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` in templates: refuses names with a leading underscore, such as Python's own."""

    def __init__(*args: Any, **items: Any) -> None:
        self, given = args[0], dict(*args[1:], **items)
        for name in given:
            _check_namespace(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_namespace(name)
        super().__setitem__(name, value)


def _check_namespace(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name[:40]!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as in Transformers, because Jinja's filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's text, for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # As in Transformers, variables set inside are not visible after the block.
        return nodes.Scope(body, lineno=line)
