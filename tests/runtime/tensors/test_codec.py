"""Tensors as bytes and values: what is written is read, and nothing else is."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.protos.errors import InvalidRequestError
from trtc.runtime.tensors.codec import (
    ACCEPTED,
    array_of_bytes,
    array_of_values,
    bytes_of,
    check_input,
    datatype,
)
from trtc.runtime.tensors.table import INPUTS, OUTPUTS

NUMBERS = {"BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
WIDTHS = {"INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q"}
WIDTHS |= {f"U{name}": code.upper() for name, code in WIDTHS.items()}


def test_every_tensor_may_be_sent_as_what_the_metadata_says() -> None:
    for tensor in INPUTS:
        assert datatype(tensor) in ACCEPTED[tensor.data_type]
        assert check_input(tensor.name, datatype(tensor), [2, *(abs(one) for one in tensor.dims)])
    assert {datatype(tensor) for tensor in OUTPUTS} == {"BYTES", "INT32", "FP32"}


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_strings_are_read_as_they_were_written(texts: list[bytes]) -> None:
    array = np.array([*texts, None], object)[:-1].reshape(1, -1)
    data = bytes_of(array)
    assert data == b"".join(struct.pack("<I", len(text)) + text for text in texts)
    assert array_of_bytes("stop_words", "BYTES", [1, len(texts)], data).tolist() == [texts]


@pytest.mark.parametrize(("kind", "code"), WIDTHS.items())
@given(data=st.data())
def test_integers_of_every_width_are_little_endian(kind: str, code: str, data: Any) -> None:
    bits = struct.calcsize(code) * 8
    least, most = (0, 2**bits - 1) if code.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    values = data.draw(st.lists(st.integers(least, most), max_size=9))
    raw, shape = struct.pack(f"<{len(values)}{code}", *values), [1, len(values)]
    assert array_of_bytes("input_ids", kind, shape, raw).tolist() == [values]
    assert array_of_values("input_ids", kind, shape, values).tolist() == [values]
    for beyond in (least - 1, most + 1):
        with pytest.raises(InvalidRequestError, match=f"has a value that is not {kind}"):
            array_of_values("input_ids", kind, [1, 1], [beyond])


@given(
    name=st.sampled_from([*(one.name for one in INPUTS), "nothing"]),
    kind=st.sampled_from([*WIDTHS, *NUMBERS, "BYTES", "BF16", ""]),
    shape=st.lists(st.integers(-2, 2**63 - 1) | st.integers(0, 3), max_size=5),
    data=st.binary(max_size=64),
)
def test_whatever_comes_is_an_array_or_a_refusal(
    name: str, kind: str, shape: list[int], data: bytes
) -> None:
    try:
        array = array_of_bytes(name, kind, shape, data)
    except InvalidRequestError as error:
        assert error.field and error.remedy
    else:
        assert list(array.shape) == shape
        assert bytes_of(array) == data or kind == "BOOL"


@pytest.mark.parametrize(
    ("data", "count"),
    [(b"\x01\0\0", 1), (b"\x02\0\0\0a", 1), (b"\xff\xff\xff\xff", 1), (b"", 1), (b"\0\0\0\0x", 1)],
)
def test_strings_that_do_not_fill_their_bytes_are_refused(data: bytes, count: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"text_input: does not hold {count} strings"):
        array_of_bytes("text_input", "BYTES", [count, 1], data)


def test_more_strings_than_a_tensor_may_have_are_refused_unread() -> None:
    with pytest.raises(InvalidRequestError, match="stop_words: has 4000000000 strings"):
        array_of_bytes("stop_words", "BYTES", [1, 4_000_000_000], b"")
