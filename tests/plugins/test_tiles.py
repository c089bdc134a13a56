"""Weights in tiles: the order in which the CUDA kernels read 4-bit weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.plugins.tiles import CHANNELS, ROWS, fits, tile, untile, untile_groups


@given(
    dtype=st.sampled_from(["i4", "u4"]),
    tiles=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    experts=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_untile_gives_what_tile_was_given(dtype, tiles, experts, seed):
    rng = np.random.default_rng(seed)
    shape = (*([experts] if experts else []), tiles[0] * ROWS, tiles[1] * CHANNELS)
    low = 0 if dtype == "u4" else -8
    weight = rng.integers(low, low + 16, shape).astype(NUMPY_DTYPES[dtype])
    tiled = tile(weight, CHANNELS)
    assert (tiled.shape, tiled.dtype) == (weight.shape, weight.dtype)
    assert np.array_equal(untile(tiled, CHANNELS), weight)
    scales = rng.random((*shape[:-1], 5))
    assert np.array_equal(untile_groups(tile(scales, 1)), scales)


def test_a_tile_is_whole_in_memory():
    """Row r and channel c of a weight at their documented place, and scales beside each other."""
    weight = np.arange(2 * ROWS * 3 * CHANNELS).reshape(2 * ROWS, 3 * CHANNELS)
    flat = tile(weight, CHANNELS).reshape(-1)
    row, channel = ROWS + 5, 2 * CHANNELS + 7
    place = (1 * 3 + 2) * ROWS * CHANNELS + 5 * CHANNELS + 7
    assert flat[place] == weight[row, channel]
    scales = np.arange(2 * ROWS * 4).reshape(2 * ROWS, 4)
    assert tile(scales, 1).reshape(-1)[(1 * 4 + 3) * ROWS + 5] == scales[row, 3]


def test_experts_follow_one_another():
    weight = np.random.default_rng(0).random((3, 2 * ROWS, 2 * CHANNELS))
    assert np.array_equal(tile(weight, CHANNELS), np.stack([tile(w, CHANNELS) for w in weight]))


@pytest.mark.parametrize(
    ("columns", "depth", "group", "expected"),
    [
        (48, 256, 128, True),
        (16, 128, 0, True),
        (16, 256, 32, True),
        (40, 256, 128, False),
        (48, 192, 64, False),
        (48, 256, 16, False),
    ],
)
def test_only_whole_tiles_fit(columns, depth, group, expected):
    assert fits(columns, depth, group) is expected
