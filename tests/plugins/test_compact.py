"""plugins/compact.py: bf16 weights in 12 bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.plugins.compact import (
    BLOCK,
    SMALLEST,
    compact_bytes,
    compact_scales,
    pack_compact,
    unpack_compact,
    unpack_compact_experts,
)
from trtc.plugins.layouts import PANEL
from trtc.plugins.rounding import NUMPY_DTYPES, cast
from trtc.protos.errors import CheckpointError

BF16 = NUMPY_DTYPES["bf16"]


def again(weight: np.ndarray) -> np.ndarray:
    """What kernels multiply with, in f32."""
    packed = pack_compact(weight)
    assert packed.dtype == np.uint8 and packed.nbytes == compact_bytes(*weight.shape)
    return unpack_compact(packed, *weight.shape).astype(np.float32) * compact_scales(weight)


@given(
    num_columns=st.integers(1, 50),
    depth=st.integers(1, 70),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    seed=st.integers(0, 9),
)
def test_all_but_the_smallest_are_what_they_were(
    num_columns: int, depth: int, size: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = cast(rng.standard_normal((num_columns, depth)).astype(np.float32) * size, "bf16")
    weight[rng.random(weight.shape) < 0.1] = 0
    found, wide = again(weight), weight.astype(np.float32)
    unit = compact_scales(weight)
    is_large = np.abs(wide) >= SMALLEST * unit
    assert np.array_equal(found[is_large], wide[is_large])
    assert np.all(np.abs(found - wide) <= SMALLEST / 2 * unit)
    assert not found[wide == 0].any()


def test_numbers_around_the_smallest_go_to_the_nearest() -> None:
    """Of 1 in the same row."""
    row = [1, SMALLEST, SMALLEST * 0.996, SMALLEST / 2, SMALLEST * 0.498, -SMALLEST * 0.75, -0.0, 0]
    weight = np.array([row], BF16)
    expected = [1, SMALLEST, SMALLEST, SMALLEST, 0, -SMALLEST, 0, 0]
    np.testing.assert_array_equal(again(weight)[0], np.array(expected, np.float32))


@pytest.mark.parametrize("largest", [1.0, 1.99, 2.0, 3e38, 2.0**-126, 2.0**-130, 0.0])
def test_scales_are_normal_powers_of_two(largest: float) -> None:
    weight = np.array([[largest / 2, -largest]], np.float32).astype(BF16)
    (scale,) = compact_scales(weight).ravel()
    assert np.log2(scale).is_integer() and scale >= 2.0**-126
    if largest >= 2.0**-125:
        assert 1 <= float(weight[0, 0]) * 2 / scale < 2
        assert np.array_equal(again(weight), weight.astype(np.float32))
    else:
        assert np.abs(again(weight)).max() <= 2.0**-126


def test_a_byte_is_where_it_is_said_to_be() -> None:
    weight = np.zeros((PANEL, 16), BF16)
    column, k = 6, 8 + 5  # of the second block, i = 1 of its second four
    weight[column, k] = -1.5  # bits 0xbfc0
    weight[column, 0] = 1.0
    packed = pack_compact(weight)[BLOCK:]
    place = column // 4 * 16 + 1 // 2 * 8 + column % 4 * 2 + 1 % 2
    assert packed[64 + place] == 0xC0
    assert packed[128 + place] == 15 << 4
    assert np.count_nonzero(packed) == 2


def test_experts_follow_one_another() -> None:
    rng = np.random.default_rng(1)
    weight = cast(rng.standard_normal((3, 20, 24)).astype(np.float32), "bf16")
    packed = pack_compact(weight)
    assert packed.tobytes() == b"".join(pack_compact(expert).tobytes() for expert in weight)
    found = unpack_compact_experts(packed, 3, 20, 24).astype(np.float32) * compact_scales(weight)
    assert np.abs(found - weight.astype(np.float32)).max() < 4 * SMALLEST


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_refused(value: float) -> None:
    weight = np.ones((2, 8), BF16)
    weight[1, 3] = value
    with pytest.raises(CheckpointError, match="NaN or infinity") as refusal:
        compact_scales(weight)
    assert refusal.value.remedy
