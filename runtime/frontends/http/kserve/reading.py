"""Converts nested lists of JSON values to tensors."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from numpy.typing import NDArray

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.tensors.codec import array_of_values, check_input

MAX_DEPTH = 8
API = "KServe's protocol"


def array_of_json(name: str, sent_as: str, shape: Sequence[int], data: object) -> NDArray[Any]:
    """An input from JSON values, in lists nested by its shape or in one flat list.

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
