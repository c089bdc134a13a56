"""Renders a chat template, a program of the checkpoint's author, inside a limited process.

Jinja's sandbox keeps the template from Python's internals; the process's limits bound what it can
take, which no sandbox inside of an interpreter can: see `chat_workers` for both.
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
    """Import and read what is imported and read when needed: then no file can be opened."""
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
    # Whatever the template does wrong is an error of its input.
    except Exception as error:  # noqa: BLE001
        return _failed("refused", error)
    return {"status": "ok", "text": "".join(pieces)}


def _failed(status: str, error: Exception) -> Message:
    """One line, of bounded length: the template writes the text of its errors."""
    text = str(error) or type(error).__name__
    problem = " ".join(text[: 2 * _MAX_PROBLEM_CHARACTERS].split())
    return {"status": status, "problem": problem[:_MAX_PROBLEM_CHARACTERS]}


def _environment() -> ImmutableSandboxedEnvironment:
    """As Transformers makes it."""
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
    """The two ways to make one, and none to Python's own class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Holds no names that begin with an underscore, among which are Python's own."""

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
    """As Transformers does it: Jinja's own escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what the assistant wrote, for training: here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # As Transformers has it, what is set inside is not set behind it.
        return nodes.Scope(body, lineno=line)
