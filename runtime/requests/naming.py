"""Errors that name fields of a draft, in the words of the client that sent it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trtc.protos.errors import TrtcError


@contextmanager
def fields_as_sent(sent_as: Mapping[str, str]) -> Iterator[None]:
    """Name the client's inputs in errors that name fields of a draft."""
    try:
        yield
    except TrtcError as error:
        raise as_sent(error, sent_as) from error


def as_sent(error: TrtcError, sent_as: Mapping[str, str]) -> TrtcError:
    """The error with the name of the client's input for the field of the draft."""
    name, space, rest = error.field.partition(" ")  # "stop (how many)"
    field = f"{sent_as.get(name, name)}{space}{rest}"
    return type(error)(error.problem, field=field, remedy=error.remedy)
