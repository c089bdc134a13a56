"""Linears that stay unquantised: parses the globs of `--keep`, and matches them."""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from trtc.protos.errors import RequestError
from trtc.quant.site_format import site_of

KEPT_DTYPE = "bf16"
_FIELD = "--keep"
_NEAR = 3


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
    sites = {site_of(name) for name in matched}
    kept = tuple(name for name in linears if site_of(name) in sites)
    if kept and len(kept) == len(linears):
        raise RequestError(
            "names every linear: nothing is left to quantise",
            field=_FIELD,
            remedy="Build with --dtype bf16, or name fewer",
        )
    return kept
