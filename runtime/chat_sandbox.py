"""Renders a model's chat template, which is a program from a stranger, in Jinja's sandbox.

Bounds: the size of the template and of its text, the time it takes, and the sizes that `*` and
`**` may make. The clock is read at every call, attribute and piece of output.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtc.protos.errors import InvalidRequestError, NoTokenizerError

MAX_TEMPLATE_CHARACTERS = 1 << 18
MAX_TEXT_CHARACTERS = 1 << 24
MAX_SECONDS = 2.0
_MAX_PRODUCT = 1 << 20


def render(
    source: str, special_tokens: Mapping[str, str], messages: Sequence[Mapping[str, str]]
) -> str:
    """The prompt for the assistant's next message, as the template `source` writes it.

    Raises:
        InvalidRequestError: the template refuses the messages, or goes over a bound.
        NoTokenizerError: the template is not valid Jinja, or too long.
    """
    environment = _Environment()
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise _unusable(f"the chat template has {len(source)} characters")
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise _unusable(f"the chat template is not valid Jinja ({error})") from error
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(
            messages=[dict(message) for message in messages],
            add_generation_prompt=True,
            **special_tokens,
        ):
            environment.check_time()
            length += len(piece)
            if length > MAX_TEXT_CHARACTERS:
                raise _Refused(f"gives more than {MAX_TEXT_CHARACTERS} characters")
            pieces.append(piece)
    # Whatever a stranger's program does wrong is an error of its input, not of ours.
    except (
        TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError,
        RecursionError, MemoryError,
    ) as error:  # fmt: skip
        raise InvalidRequestError(
            f"the model's chat template refuses them ({error})",
            field="messages",
            remedy="Give roles and contents that the template knows",
        ) from error
    return "".join(pieces)


class _Refused(TemplateError):
    """The template goes over a bound, or says itself that the messages are wrong."""


class _Environment(ImmutableSandboxedEnvironment):
    """One rendering's environment, with its own deadline."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True)
        self._deadline = time.monotonic() + MAX_SECONDS
        self.globals["raise_exception"] = _raise_exception
        self.filters["tojson"] = _to_json

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise _Refused(f"takes more than {MAX_SECONDS:g} seconds")

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any | Undefined:
        self.check_time()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.check_time()
        if _size(left) * _size(right) > _MAX_PRODUCT:
            raise _Refused(f"asks for too large a value with {operator}")
        return super().call_binop(context, operator, left, right)


def _size(value: object) -> int:
    if isinstance(value, str | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(
    value: object, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False
) -> str:
    """As Transformers does it: Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _unusable(problem: str) -> NoTokenizerError:
    return NoTokenizerError(problem, field="messages", remedy="Give a text prompt")
