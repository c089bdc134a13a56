"""Translates field names in errors from those of RequestInput to those of the client's protocol."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trtc.protos.errors import TrtcError


@contextmanager
def fields_as_sent(sent_as: Mapping[str, str]) -> Iterator[None]:
    """Context manager: errors that name fields of RequestInput name the client's fields instead."""
    try:
        yield
    except TrtcError as error:
        raise as_sent(error, sent_as) from error


def as_sent(error: TrtcError, sent_as: Mapping[str, str]) -> TrtcError:
    """A copy of the error that names the client's field: for the field of RequestInput, or for the
    longest prefix of its path that has one."""
    name, space, rest = error.field.partition(" ")  # "stop (how many)"
    known = max((one for one in sent_as if _begins(name, one)), key=len, default=None)
    own = name if known is None else sent_as[known] + name[len(known) :]
    renamed = copy.copy(error)  # with all that its class adds
    renamed.field = f"{own}{space}{rest}"
    return renamed


def _begins(path: str, name: str) -> bool:
    return path.startswith(name) and path[len(name) : len(name) + 1] in ("", ".", "[")
