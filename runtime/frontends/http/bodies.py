"""Parses bodies: one pass finds the names of fields, another decodes the known ones."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.exchange import Headers

MAX_IGNORED = 32
"""Most names in the header that lists ignored fields."""
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
"""The path of a value, at the end of msgspec's messages."""


Refused = Mapping[str, Sequence[Any]]
"""Unsupported fields that would change the answer -> values that are accepted, because they ask for
what the server does anyway. null is accepted too; other values are refused."""


class Fields(msgspec.Struct, kw_only=True):
    """The fields of a request that are read; fields that are neither read nor refused are
    ignored."""

    api: ClassVar[str]
    """Name of the API whose reference defines the fields."""
    refused: ClassVar[Refused] = {}


FieldsT = TypeVar("FieldsT", bound=Fields)
T = TypeVar("T")


@dataclass(frozen=True)
class Given(Generic[FieldsT]):
    """The parsed fields of a body."""

    fields: FieldsT
    ignored: tuple[str, ...]
    """Names of unknown fields."""

    @property
    def headers(self) -> Headers:
        """The header that lists ignored fields; names that a header cannot carry become `?`."""
        names = [name if _FIELD_NAME.fullmatch(name) else "?" for name in self.ignored]
        listed = ", ".join(dict.fromkeys(names[:MAX_IGNORED]))
        return ((b"x-trtc-ignored", listed.encode()),) if listed else ()


def read(body: bytes, kind: type[FieldsT], *, within: str = "") -> Given[FieldsT]:
    """The fields of a JSON body, or of an object in a field of a body.

    Args:
        within: prefix of field names, in errors and in the list of ignored fields.

    Raises:
        InvalidRequestError: it is not a JSON object, a field has another type or is not supported.
    """
    with _json_of(kind.api, within):
        body.decode()  # ignored fields are not decoded below, and so not checked
        names = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        fields = msgspec.json.decode(body, type=kind)
        refused = {
            name: msgspec.json.decode(names[name]) for name in kind.refused.keys() & names.keys()
        }
    for name, value in refused.items():
        if value is not None and value not in kind.refused[name]:
            raise InvalidRequestError(
                "is not supported by this server", field=within + name, remedy="Leave it out"
            )
    known = kind.refused.keys() | set(kind.__struct_encode_fields__)
    unknown = [name for name, raw in names.items() if name not in known and bytes(raw) != b"null"]
    return Given(fields, tuple(within + name for name in unknown))


def decoded(body: bytes, kind: type[T], api: str) -> T:
    """A decoded JSON body; callers check its fields.

    Raises:
        InvalidRequestError: it is not JSON, or has another type.
    """
    with _json_of(api, ""):
        body.decode()
        return msgspec.json.decode(body, type=kind)


@contextmanager
def _json_of(api: str, within: str) -> Iterator[None]:
    """Context manager that turns decoding errors into errors of the request."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise _wrong_type(error, within, api) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"the body is not JSON ({error})", remedy="Send one JSON object in UTF-8"
        ) from error
    except RecursionError:
        raise InvalidRequestError(
            "the body is nested too deeply", remedy="Send lists and objects of fewer levels"
        ) from None


def _wrong_type(error: msgspec.ValidationError, within: str, api: str) -> InvalidRequestError:
    said = str(error)
    place = _PATH.search(said)
    problem = said if place is None else said[: place.start()]
    return InvalidRequestError(
        problem.replace("`", "").replace("Expected", "expected", 1),
        field=(within + ("" if place is None else place[1].partition("[...]")[0])).rstrip("."),
        remedy=f"See {api}'s reference for its type",
    )
