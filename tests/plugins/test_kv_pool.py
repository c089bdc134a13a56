"""The bytes of a pool whose keys and values have scales, against a layout that is written down."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trtc.plugins.four_bits import hadamard_block, packed, unpacked
from trtc.plugins.hadamard import hadamard_product
from trtc.plugins.kv_pool import PagedHeads

PAGES, PAGE_SIZE, HEADS, HEAD_DIM = 3, 8, 2, 16


def test_codes_of_a_page_come_first_and_their_scales_behind_them() -> None:
    rng = np.random.default_rng(0)
    pool = rng.integers(-128, 128, (PAGES, 2, PAGE_SIZE, HEADS, HEAD_DIM + 4)).astype(np.int8)
    before = pool.copy()
    slots = np.array([9, 0])
    rows = rng.normal(size=(2, HEADS, HEAD_DIM)).astype(np.float32)
    rows[1, 1] = 0
    PagedHeads(pool, HEAD_DIM).write(1, slots, rows)

    changed = np.zeros(pool.size, bool)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        page, offset = divmod(slot, PAGE_SIZE)
        plane = (page * 2 + 1) * PAGE_SIZE * HEADS * (HEAD_DIM + 4)
        for head in range(HEADS):
            first = plane + (offset * HEADS + head) * HEAD_DIM
            at_scale = plane + PAGE_SIZE * HEADS * HEAD_DIM + (offset * HEADS + head) * 4
            codes = pool.reshape(-1)[first : first + HEAD_DIM]
            (scale,) = pool.reshape(-1)[at_scale : at_scale + 4].view(np.float32)
            np.testing.assert_allclose(codes * scale, row[head], atol=np.abs(row[head]).max() / 253)
            assert np.abs(codes).max() == (127 if row[head].any() else 0)
            changed[first : first + HEAD_DIM] = changed[at_scale : at_scale + 4] = True
    assert (pool.reshape(-1)[~changed] == before.reshape(-1)[~changed]).all()


def test_what_is_not_finite_is_not_lost() -> None:
    pool = np.zeros((PAGES, 2, PAGE_SIZE, HEADS, HEAD_DIM + 4), np.int8)
    rows = np.ones((1, HEADS, HEAD_DIM), np.float32)
    rows[0, 0, 3] = np.nan
    heads = PagedHeads(pool, HEAD_DIM)
    heads.write(0, np.array([2]), rows)
    found = heads.read(np.array([2]))
    assert np.isnan(found[0, 0, 0]).all()
    np.testing.assert_allclose(found[0, 0, 1], 1.0)


@given(arrays(np.int8, (3, 14), elements=st.integers(-8, 7)))
def test_packing_loses_no_code(codes: np.ndarray) -> None:
    stored = packed(codes.astype(np.float32))
    assert stored.shape == (3, 7)
    np.testing.assert_array_equal(unpacked(stored), codes)
    # Byte i has the numbers 2 i and 2 i + 1, the first in the low half, each 8 above what it is.
    low, high = codes[:, 0::2].astype(np.int32) + 8, codes[:, 1::2].astype(np.int32) + 8
    np.testing.assert_array_equal(stored, low + 16 * high)


@given(arrays(np.float32, 16, elements=st.floats(-20, 20, width=32)))
def test_packing_rounds_to_the_nearest_code(units: np.ndarray) -> None:
    nearest = np.clip(units, -8, 7)
    assert (np.abs(unpacked(packed(units)) - nearest) <= 0.5).all()


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128])
def test_heads_are_turned_by_a_matrix_that_undoes_itself(head_dim: int) -> None:
    """Sylvester's, block by block: the sign of (i, j) is the parity of the bits of i & j."""
    block = hadamard_block(head_dim)
    assert head_dim % block == 0 and (head_dim // block) % 2 == 1
    matrix = np.zeros((head_dim, head_dim))
    for i in range(head_dim):
        for j in range(head_dim):
            if i // block == j // block:
                matrix[i, j] = (-1) ** (i & j & (block - 1)).bit_count()
    np.testing.assert_array_equal(matrix @ matrix, block * np.eye(head_dim))
    rows = np.random.default_rng(0).integers(-99, 99, (5, 3, head_dim)).astype(np.float32)
    np.testing.assert_array_equal(hadamard_product(rows, block), rows @ matrix)


def four_bit_pool(head_dim: int) -> tuple[np.ndarray, PagedHeads]:
    pool = np.random.default_rng(1).integers(
        0, 256, (PAGES, 2, PAGE_SIZE, HEADS, head_dim // 2 + 4)
    )
    stored = pool.astype(np.uint8)
    return stored, PagedHeads(stored, head_dim)


@pytest.mark.parametrize("head_dim", [24, 64, 128])
def test_scores_and_values_of_4_bits_are_near_those_of_what_was_written(head_dim: int) -> None:
    """A key may be off by half a unit, a sixteenth of the largest magnitude, in each channel."""
    rng = np.random.default_rng(2)
    _, pool = four_bit_pool(head_dim)
    slots = np.array([9, 0, 17])
    keys, values = rng.normal(size=(2, 3, HEADS, head_dim)).astype(np.float32)
    keys[:, :, 5] *= 30
    for plane, rows in enumerate((keys, values)):
        pool.write(plane, slots, rows)
    found = pool.read(slots)
    largest = np.abs(values).max(-1, keepdims=True)
    assert (np.abs(found[:, 1] - values) <= largest / 8 * 1.001).all(), "a unit, where 8 is cut"
    assert (np.abs(found[:, 1] - values).mean(-1) < largest[..., 0] / 20).all()
    queries = rng.normal(size=(3, HEADS, head_dim)).astype(ml_dtypes.bfloat16)
    exact = (queries.astype(np.float32) * keys).sum(-1)
    scores = (pool.queries(queries) * found[:, 0]).sum(-1)
    # An outlier of 30 would leave the other channels no code but 0, were it not spread.
    size = np.sqrt((keys**2).sum(-1))
    assert (np.abs(scores - exact) < 0.2 * size).all()
    others = np.delete(found[:, 0], 0, axis=0)
    assert (others != 0).mean() > 0.5


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_magnitude_is_8_units_whatever_its_sign(sign: int) -> None:
    _, pool = four_bit_pool(16)
    rows = np.linspace(-0.5, 0.5, 2 * 16, dtype=np.float32).reshape(1, 2, 16)
    rows[0, :, 3] = sign * 4.0
    pool.write(1, np.array([5]), rows)
    assert pool.scales is not None
    np.testing.assert_array_equal(pool.scales[0, 1, 5], [sign * -0.5] * 2)
    np.testing.assert_array_equal(pool.read(np.array([5]))[0, 1, :, 3], [sign * 4.0] * 2)


def test_four_bits_change_no_byte_of_other_tokens() -> None:
    stored, pool = four_bit_pool(16)
    before = stored.copy()
    pool.write(1, np.array([9]), np.ones((1, HEADS, 16), np.float32))
    changed = np.flatnonzero((stored != before).reshape(-1))
    plane = (1 * 2 + 1) * PAGE_SIZE * HEADS * 12
    codes = plane + np.arange(1 * HEADS * 8, 2 * HEADS * 8)
    scales = plane + PAGE_SIZE * HEADS * 8 + np.arange(1 * HEADS * 4, 2 * HEADS * 4)
    assert set(changed.tolist()) <= {*codes.tolist(), *scales.tolist()}
    assert (stored.reshape(-1)[codes] == 0x00).all(), "ones are -8 units of -1/8"


def test_zeros_and_what_is_not_finite_stay_so_in_4_bits() -> None:
    _, pool = four_bit_pool(16)
    rows = np.zeros((1, HEADS, 16), np.float32)
    rows[0, 0, 3] = np.inf
    for plane in (0, 1):
        pool.write(plane, np.array([2]), rows)
        found = pool.read(np.array([2]))[0, plane]
        assert np.isnan(found[0]).all()
        np.testing.assert_array_equal(found[1], np.zeros(16))
