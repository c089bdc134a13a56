"""Parses protobuf messages with limits: fields are counted in the encoded bytes first.

Two bytes of an empty submessage become 120 bytes of objects, and the parser holds the GIL until it
is done. Counting stops at the limit, so a refused message costs no more than an accepted one.
"""

from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from trtc.protos.errors import InvalidRequestError

MAX_FIELDS = 1 << 14
"""Most fields of a message, including those of submessages. A packed field counts once."""
MAX_NUMBERS = 1 << 18
"""Most items of a message's packed fields together: one byte may become eight."""
UNCOUNTED_BYTES = 1 << 12
"""Shorter messages are not counted."""
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
}
_CONTINUED = bytes(range(0x80, 0x100))
"""Bytes of a varint that are not its last."""

MessageT = TypeVar("MessageT", bound=Message)


def parse(kind: type[MessageT], data: bytes, *, max_numbers: int = MAX_NUMBERS) -> MessageT:
    """The message that `data` encodes.

    Raises:
        InvalidRequestError: it is not a message of this kind, or has too many fields or numbers.
    """
    try:
        if len(data) > UNCOUNTED_BYTES:
            _check_fields(data, kind.DESCRIPTOR, max_numbers)
        return kind.FromString(data)
    except (DecodeError, IndexError) as error:
        raise InvalidRequestError(
            f"the request is not a valid message ({error})",
            remedy=f"Strings must be UTF-8; use stubs generated from {kind.DESCRIPTOR.file.name}",
        ) from error


def _check_fields(data: bytes, descriptor: Any, max_numbers: int) -> None:
    """Raises DecodeError or IndexError for malformed messages, and InvalidRequestError beyond
    MAX_FIELDS or `max_numbers`."""
    count = num_numbers = 0
    parts = [(0, len(data), descriptor)]
    while parts:
        at, end, kind = parts.pop()
        nested, packed = _nested(kind), _packed(kind)
        while at < end:
            count += 1
            key, at = _varint(data, at)
            wire_type = key & 7
            if wire_type == _LENGTH:
                size, at = _varint(data, at)
                if key >> 3 in nested:
                    parts.append((at, at + size, nested[key >> 3]))
                elif key >> 3 in packed:
                    num_numbers += _num_numbers(data[at : at + size], packed[key >> 3])
                at += size
            elif wire_type == _VARINT:
                _, at = _varint(data, at)
            elif wire_type in (_FIXED32, _FIXED64):
                at += 4 if wire_type == _FIXED32 else 8
            else:
                raise DecodeError(f"wire type {wire_type}")
            if count > MAX_FIELDS:
                raise InvalidRequestError(
                    f"the request has more than {MAX_FIELDS} fields",
                    remedy="Send fewer messages, stop strings or biases",
                )
            if num_numbers > max_numbers:
                raise InvalidRequestError(
                    f"the request has more than {max_numbers} numbers",
                    remedy="Send fewer: prompt and completion must fit the model's context",
                )
        if at != end:
            raise DecodeError("a field goes beyond the end of its message")


@cache
def _nested(kind: Any) -> dict[int, Any]:
    """Submessages by field number; entries of maps are submessages."""
    return {
        field.number: field.message_type for field in kind.fields if field.message_type is not None
    }


@cache
def _packed(kind: Any) -> dict[int, int]:
    """Packed fields: number -> bytes of an item; 0 for varints."""
    return {
        field.number: _FIXED_BYTES.get(field.type, 0) for field in kind.fields if field.is_packed
    }


def _num_numbers(packed: bytes, item_bytes: int) -> int:
    if item_bytes:
        return len(packed) // item_bytes
    return len(packed.translate(None, _CONTINUED))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(number, index after it); raises IndexError beyond the end."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while shift < 70:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise DecodeError("a number has more than ten bytes")
