"""protos/byte_size.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.protos.byte_size import parse_bytes
from trtc.protos.errors import RequestError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("800000000", 800_000_000),
        ("5GB", 5_000_000_000),
        ("5 gb", 5_000_000_000),
        ("4.5GiB", 4_831_838_208),
        ("16kB", 16_000),
        ("16KiB", 16_384),
        ("0.5MiB", 524_288),
        ("2TB", 2_000_000_000_000),
        (" 7B ", 7),
    ],
)
def test_units_are_powers_of_1000_and_1024(text: str, size: int) -> None:
    assert parse_bytes(text, "--max-bytes") == size


@pytest.mark.parametrize(
    "text", ["", "GB", "5G", "5GBs", "-5GB", "1e9", "5,5GB", "0", "0.1B", "nan", "9999999TB", "٥GB"]
)
def test_what_is_no_size_is_refused_by_the_option(text: str) -> None:
    with pytest.raises(RequestError, match=r"--max-bytes: is .*5GB"):
        parse_bytes(text, "--max-bytes")


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_an_error(text: str) -> None:
    try:
        assert parse_bytes(text, "--max-bytes") > 0
    except RequestError as error:
        assert error.field == "--max-bytes"
