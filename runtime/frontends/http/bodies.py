"""Bodies become fields: one pass for the names that are given, one for the values that are read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.frontends.http.exchange import Headers

MAX_IGNORED = 32
"""Names in the header that lists ignored fields."""
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
"""Where a value is, at the end of msgspec's messages."""


Refused = Mapping[str, Sequence[Any]]
"""Fields that would change the answer, and that this server does not have: any other value than
null and these ends in an error, and these mean what the server does anyway."""


class Fields(msgspec.Struct, kw_only=True):
    """The fields of a request that are read; what is neither read nor refused is ignored."""

    api: ClassVar[str]
    """Whose reference has the fields' types."""
    refused: ClassVar[Refused] = {}


FieldsT = TypeVar("FieldsT", bound=Fields)
T = TypeVar("T")


@dataclass(frozen=True)
class Given(Generic[FieldsT]):
    """What a body says."""

    fields: FieldsT
    ignored: tuple[str, ...]
    """Names that the server does not know."""

    @property
    def headers(self) -> Headers:
        """Names what is ignored; a name that a header cannot carry counts as `?`."""
        names = [name if _FIELD_NAME.fullmatch(name) else "?" for name in self.ignored]
        listed = ", ".join(dict.fromkeys(names[:MAX_IGNORED]))
        return ((b"x-trtc-ignored", listed.encode()),) if listed else ()


def read(body: bytes, kind: type[FieldsT], *, within: str = "") -> Given[FieldsT]:
    """The fields of a JSON body, or of one that lies in a field of another.

    Args:
        within: stands before the names of fields in errors and among those ignored.

    Raises:
        InvalidRequestError: it is no JSON object, a field has another type, or is not supported.
    """
    with _json_of(kind.api, within):
        body.decode()  # what is not read is not decoded, nor checked, below
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
    """A JSON body whose fields are read one by one, behind this.

    Raises:
        InvalidRequestError: it is no JSON, or of another type.
    """
    with _json_of(api, ""):
        body.decode()
        return msgspec.json.decode(body, type=kind)


@contextmanager
def _json_of(api: str, within: str) -> Iterator[None]:
    """Errors of decoding in the block, as those of the request."""
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
