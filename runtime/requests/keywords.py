"""Gives functions with `**options` a signature, a docstring and errors that name each option.

Methods that share many options take `**options: Unpack[SomeTypedDict]`, which type checkers
understand. `takes` shows the same to `help`, `inspect.signature` and notebooks.
"""

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_WIDTH = 88
"""Columns of a docstring."""


class Keyword(NamedTuple):
    """One keyword argument, for a signature and a docstring."""

    annotation: Any
    default: object
    description: str


def names_checked(function: FunctionT) -> FunctionT:
    """Let an unknown keyword argument raise a TypeError that names the nearest known one."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise TypeError(_unexpected(function.__name__, name, known))
        return function(*args, **kwargs)

    return cast(FunctionT, call)


def takes(keywords: Mapping[str, Keyword]) -> Callable[[FunctionT], FunctionT]:
    """Replace a function's `**options` by `keywords` in its signature and docstring.

    Names are checked as by `names_checked`. `options` has only the keywords that are given.
    """

    def spell_out(function: FunctionT) -> FunctionT:
        return names_checked(cast(FunctionT, _spelt_out(function, keywords)))

    return spell_out


def _spelt_out(function: Any, keywords: Mapping[str, Keyword]) -> Any:
    signature = inspect.signature(function)
    own = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=keyword.default,
            annotation=keyword.annotation,
        )
        for name, keyword in keywords.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])
    described = [f"{name}: {keyword.description}" for name, keyword in keywords.items()]
    head = inspect.cleandoc(function.__doc__ or "")
    function.__doc__ = f"{head}\n\nOptions:\n{_indented(described)}\n"
    return function


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(_wrapped(f"    {line}") for line in lines)


def _wrapped(line: str) -> str:
    if len(line) <= _WIDTH:  # textwrap takes 20 us for a line that it leaves as it is
        return line
    return textwrap.fill(line, _WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False)


def _unexpected(function: str, name: str, known: Iterable[str]) -> str:
    import difflib  # only for errors, so that start-up does not import it

    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f". Did you mean {nearest[0]!r}?" if nearest else ""
    return f"{function}() got an unexpected keyword argument {name!r}{hint}"
