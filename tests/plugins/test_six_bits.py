"""The order in which CUDA kernels read weights of 6 bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.plugins.six_bits import LEAST, MOST, UNIT, join, split


@given(rows=st.integers(1, 9), units=st.integers(1, 4), seed=st.integers(0, 9))
def test_join_gives_what_split_was_given(rows: int, units: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(LEAST, MOST + 1, (rows, units * UNIT))
    weight = codes.astype(np.int8)
    packed = split(weight)
    assert packed.dtype == np.uint8 and packed.nbytes == weight.size * 6 // 8
    assert np.array_equal(join(packed, *weight.shape), weight)
    experts = np.stack([weight, weight[::-1]])
    assert np.array_equal(join(split(experts), *experts.shape), experts)


def test_a_code_is_where_its_channel_says() -> None:
    """Written bit by bit for a row behind another and a unit behind another."""
    codes = np.arange(2 * 2 * UNIT).reshape(2, 2 * UNIT) * 37 % 64
    packed = split((codes + LEAST).astype(np.int8)).reshape(2, 2, 3, UNIT // 4)
    for row, channel in ((0, 0), (0, 131), (1, 6), (1, 9), (1, 255)):
        planes = packed[row, channel // UNIT, :, channel % UNIT // 4]
        low = planes[channel % 4 // 2] >> 4 * (channel % 2) & 15
        assert low + 16 * (planes[2] >> 2 * (channel % 4) & 3) == codes[row, channel]


@pytest.mark.parametrize(
    "weight", [np.full((1, UNIT), MOST + 1, np.int8), np.zeros((1, UNIT // 2), np.int8)]
)
def test_only_whole_units_of_six_bits(weight: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        split(weight)
