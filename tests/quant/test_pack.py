"""Every bit layout: a word written out by hand, and pack and unpack as inverses."""

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.packed_words import pack_words
from trtc.quant.pack import (
    AWQ_ORDER,
    Array,
    offset_bytes,
    offset_nibbles,
    offset_sixes,
    signed_nibbles,
    unpack_awq,
    unpack_e2m1_pairs,
    unpack_row_pairs,
    unpack_words,
)


def codes(seed: int, shape: tuple[int, ...], bits: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, shape).astype(np.uint8)


def test_words_hold_the_first_code_in_their_lowest_bits() -> None:
    word = np.array([[0x76543210]], np.uint32).view(np.int32)
    assert unpack_words(word, 4, 1).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert unpack_words(word, 8, 0).tolist() == [[0x10], [0x32], [0x54], [0x76]]


def test_a_set_top_bit_is_no_sign() -> None:
    assert unpack_words(np.array([[-1]], np.int32), 4, 1).tolist() == [[15] * 8]


def test_codes_of_six_bits_go_on_in_the_next_word() -> None:
    """Code i has bits 6 i to 6 i + 5 of the words after one another."""
    found = codes(5, (1, 16), 6)
    number = sum(int(code) << 6 * i for i, code in enumerate(found[0]))
    words = np.frombuffer(number.to_bytes(12, "little"), "<i4")[None]
    np.testing.assert_array_equal(pack_words(found, 6, 1), words)
    np.testing.assert_array_equal(unpack_words(words, 6, 1), found)


def test_awq_interleaves_columns() -> None:
    # Nibble by nibble from the lowest: columns 0 2 4 6 1 3 5 7, each holding its own number.
    word = np.array([[0x75316420]], np.uint32).view(np.int32)
    assert unpack_awq(word).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_modelopt_pairs_rows() -> None:
    assert unpack_row_pairs(np.array([[0x9F]], np.uint8)).astype(int).tolist() == [[-1], [-7]]


def test_signs() -> None:
    all_codes = np.arange(16, dtype=np.uint8)
    assert signed_nibbles(all_codes).astype(int).tolist() == [*range(8), *range(-8, 0)]
    assert offset_nibbles(all_codes).astype(int).tolist() == list(range(-8, 8))
    assert offset_sixes(np.arange(64, dtype=np.uint8)).tolist() == list(range(-32, 32))
    assert offset_bytes(np.array([0, 127, 128, 255], np.uint8)).tolist() == [-128, -1, 0, 127]


@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 5),
    words=st.integers(1, 4),
    bits=st.sampled_from([4, 6, 8]),
    axis=st.sampled_from([0, 1]),
)
def test_words_round_trip(seed: int, rows: int, words: int, bits: int, axis: int) -> None:
    words *= 3 if bits == 6 else 1
    shape = (rows, words * 32 // bits) if axis else (words * 32 // bits, rows)
    original = codes(seed, shape, bits)
    packed = pack_words(original, bits, axis)
    assert packed.dtype == np.int32
    assert packed.shape[axis] == words
    np.testing.assert_array_equal(unpack_words(packed, bits, axis), original)


def pack_awq(codes: Array) -> Array:
    """i32 words [R, C] of u8 codes [R, 8C]."""
    nibbles = codes.reshape(codes.shape[0], -1, 8)[..., list(AWQ_ORDER)]
    return pack_words(nibbles.reshape(codes.shape[0], -1), 4, 1)


@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 5), words=st.integers(1, 4))
def test_awq_round_trips(seed: int, rows: int, words: int) -> None:
    original = codes(seed, (rows, 8 * words), 4)
    np.testing.assert_array_equal(unpack_awq(pack_awq(original)), original)


def pack_row_pairs(values: Array) -> Array:
    """nvidia-modelopt's u8 [N/2, K] of int4 [N, K]; N is even."""
    assert values.shape[0] % 2 == 0, f"{values.shape[0]} rows are not pairs"
    codes = values.astype(np.int8).view(np.uint8) & np.uint8(15)
    return codes[0::2] | (codes[1::2] << np.uint8(4))


@given(seed=st.integers(0, 1 << 30), pairs=st.integers(1, 5), columns=st.integers(1, 9))
def test_row_pairs_round_trip(seed: int, pairs: int, columns: int) -> None:
    original = signed_nibbles(codes(seed, (2 * pairs, columns), 4))
    packed = pack_row_pairs(original)
    assert packed.shape == (pairs, columns)
    unpacked = unpack_row_pairs(packed)
    assert unpacked.dtype == ml_dtypes.int4
    np.testing.assert_array_equal(unpacked.astype(int), original.astype(int))


def test_e2m1_pairs_are_columns_low_nibble_first() -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    packed = np.array([[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]], np.uint8)
    found = unpack_e2m1_pairs(packed)
    assert found.dtype == ml_dtypes.float4_e2m1fn
    assert found.astype(float).tolist() == [values, [-value for value in values]]
