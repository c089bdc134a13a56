"""JSON values become tensors: nested lists, one value after the other."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec
from numpy.typing import NDArray

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.tensors.codec import array_of_values, check_input

MAX_DEPTH = 8

T = TypeVar("T")


def decoded(data: bytes, kind: type[T]) -> T:
    """A JSON document of a kind.

    Raises:
        InvalidRequestError: it is no JSON, or has fields of other types.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # msgspec says in its own words what is wrong, and where.
        raise InvalidRequestError(
            f"the body cannot be read ({error})", remedy="Send one JSON object in UTF-8"
        ) from error
    except RecursionError:
        raise InvalidRequestError(
            "the body is nested too deeply", remedy="Send lists and objects of fewer levels"
        ) from None


def array_of_json(name: str, sent_as: str, shape: Sequence[int], data: object) -> NDArray[Any]:
    """An input out of JSON's values, as lists nested by its shape or all in one list.

    Raises:
        InvalidRequestError: as `array_of_values`.
    """
    check_input(name, sent_as, shape)
    values = flattened(name, data)
    return array_of_values(name, sent_as, shape, [_encoded(value) for value in values])


def flattened(name: str, data: object) -> list[Any]:
    """The values in nested lists, in order.

    Raises:
        InvalidRequestError: lists are nested too deeply.
    """
    values = data if isinstance(data, list) else [data]
    for _ in range(MAX_DEPTH):
        if not any(isinstance(value, list) for value in values):
            return values
        inner = (value if isinstance(value, list) else [value] for value in values)
        values = list(chain.from_iterable(inner))
    raise InvalidRequestError(
        f"has lists of more than {MAX_DEPTH} levels", field=name, remedy="Send a flat list"
    )


def _encoded(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value
