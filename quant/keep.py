"""Linears that calibration leaves unquantised: the globs of `--keep`, and what they name."""

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from trtc.protos.errors import RequestError

KEPT_DTYPE = "bf16"
_FIELD = "--keep"
_NEAR = 3
_TOGETHER = (
    # Experts of a layer are one operator, so their weights have one type.
    re.compile(r"^(.*\.experts)\.\d+\.[^.]+$"),
    # These share an input, which AWQ and SmoothQuant scale for all of them.
    re.compile(r"^(.*)\.(?:q|k|v)_proj$"),
    re.compile(r"^(.*)\.(?:gate|up)_proj$"),
)


def parse_keep(options: Sequence[str]) -> tuple[str, ...]:
    """The globs of `GLOB=bf16` options.

    Raises:
        RequestError: not of that form, or another type.
    """
    globs = []
    for option in options:
        glob, equals, dtype = option.rpartition("=")
        if not equals or not glob:
            raise RequestError(
                f"is {option!r}",
                field=_FIELD,
                remedy="Give a linear's name or a glob, as in '*.down_proj=bf16'",
            )
        if dtype != KEPT_DTYPE:
            raise RequestError(
                f"is {option!r}: linears are kept in {KEPT_DTYPE} only",
                field=_FIELD,
                remedy=f"Give '{glob}={KEPT_DTYPE}'",
            )
        globs.append(glob)
    return tuple(globs)


def kept_linears(globs: Sequence[str], linears: Sequence[str]) -> tuple[str, ...]:
    """The linears that the globs name, with those that can only be kept together, in their order.

    Args:
        linears: the names of all that would be quantised.

    Raises:
        RequestError: a glob that names none, with names near to it; or globs that name all.
    """
    matched: set[str] = set()
    for glob in globs:
        found = [name for name in linears if fnmatchcase(name, glob)]
        if not found:
            near = difflib.get_close_matches(glob, linears, _NEAR, 0.0)
            raise RequestError(
                f"no quantised linear is called {glob!r}",
                field=_FIELD,
                remedy=f"Linears are called {', '.join(near)}",
            )
        matched.update(found)
    groups = {_group(name) for name in matched}
    kept = tuple(name for name in linears if _group(name) in groups)
    if kept and len(kept) == len(linears):
        raise RequestError(
            "names every linear: nothing is left to quantise",
            field=_FIELD,
            remedy="Build with --dtype bf16, or name fewer",
        )
    return kept


def _group(name: str) -> tuple[int, str]:
    """What the linears that must be alike have in common."""
    for kind, pattern in enumerate(_TOGETHER):
        if found := pattern.match(name):
            return kind, found[1]
    return len(_TOGETHER), name
