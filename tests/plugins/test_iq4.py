"""Codes, numbers and scales of iq4 weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.plugins.iq4 import (
    VALUES,
    codes_of,
    scale_codes,
    scale_units,
    scales_of,
    values_of,
)
from trtc.protos.errors import CheckpointError

BYTES = np.arange(256, dtype=np.uint8)


def test_numbers_are_found_again_by_their_codes() -> None:
    codes = np.arange(16, dtype=np.uint8)
    assert tuple(values_of(codes)) == VALUES == tuple(sorted(VALUES))
    np.testing.assert_array_equal(codes_of(values_of(codes)), codes)


def test_unsigned_numbers_have_seven_bits() -> None:
    """Which products of pairs with int8 in words of 16 bits rely on."""
    assert 2 * (VALUES[-1] - VALUES[0]) * 127 < 1 << 15


def test_bytes_are_numbers_of_either_sign() -> None:
    scales = scales_of(BYTES, np.float32(1))
    assert np.unique(scales).size == 256
    assert (scales[0], scales[15], scales[16]) == (1 / 128, 31 / 16 / 128, 1 / 64)
    assert (scales[112], scales[127]) == (1.0, 31 / 16)
    np.testing.assert_array_equal(scales[128:], -scales[:128])


@given(st.integers(-60, 40), st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_scales_are_found_again_whatever_their_unit(power: int, codes: list[int]) -> None:
    scales = scales_of(np.array([codes], np.uint8), np.float32(2.0**power))
    units = scale_units(scales)
    np.testing.assert_array_equal(scales_of(scale_codes(scales, units), units), scales)


@pytest.mark.parametrize("other", [1.03125 / 2**9, 1 + 1 / 32, 0.0])
def test_other_scales_are_refused(other: float) -> None:
    scales = np.array([[1.0, other]], np.float32)
    with pytest.raises(CheckpointError, match="iq4"):
        scale_codes(scales, scale_units(scales))


def test_normal_weights_lose_less_than_by_even_steps() -> None:
    weights = np.random.default_rng(1).standard_normal((4000, 32)).astype(np.float32)

    def error(numbers: np.ndarray) -> float:
        largest = weights[np.arange(len(weights)), np.abs(weights).argmax(1)][:, None]
        best = np.full(len(weights), np.inf)
        for share in np.linspace(0.6, 1.2, 25):
            scale = largest / numbers[0] * share
            middles = (numbers[1:] + numbers[:-1]) / 2
            rounded = numbers[np.searchsorted(middles, weights / scale)] * scale
            best = np.minimum(best, np.square(rounded - weights).sum(1))
        return float(best.sum() / np.square(weights).sum())

    assert error(np.array(VALUES)) < 0.86 * error(np.arange(-8, 8))
