"""Packed weights: the bytes that every CPU kernel reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.plugins.layouts import (
    BLOCK,
    BLOCK_DEPTH,
    MOST_IN_PLANES,
    PANEL,
    pack,
    pack_columns,
    pack_planes,
    packed_bytes,
    unpack,
    unpack_columns,
    unpack_experts,
    unpack_planes,
)
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.errors import CheckpointError

RANGES = {"i8": (-128, 128), "i6": (-32, 32), "i4": (-8, 8), "u4": (0, 16), "iq4": (0, 16)}


def every_code(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random values of a weight type: all codes of the narrow ones, but NaN."""
    if dtype in RANGES:
        return rng.integers(*RANGES[dtype], shape).astype(
            NUMPY_DTYPES[{"iq4": "u4", "i6": "i8"}.get(dtype, dtype)]
        )
    if dtype == "f8e4m3":
        codes = rng.integers(0, 255, shape).astype(np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
        return codes.view(NUMPY_DTYPES[dtype])
    return rng.standard_normal(shape).astype(NUMPY_DTYPES[dtype])


@given(
    dtype=st.sampled_from(sorted(BLOCK_DEPTH)),
    num_columns=st.integers(1, 50),
    depth=st.integers(1, 70),
    seed=st.integers(0, 9),
)
def test_unpack_gives_what_pack_was_given(dtype, num_columns, depth, seed):
    weight = every_code(np.random.default_rng(seed), (num_columns, depth), dtype)
    packed = pack(weight, dtype)
    assert packed.dtype == np.uint8
    assert packed.nbytes == packed_bytes(num_columns, depth, dtype)
    assert packed.nbytes % BLOCK == 0
    again = unpack(packed, num_columns, depth, dtype)
    assert again.dtype == weight.dtype
    assert np.array_equal(again.astype(np.float32), weight.astype(np.float32))


@pytest.mark.parametrize("dtype", sorted(BLOCK_DEPTH))
def test_experts_follow_one_another(dtype):
    weight = every_code(np.random.default_rng(1), (3, 20, 24), dtype)
    packed = pack(weight, dtype)
    assert packed.tobytes() == b"".join(pack(expert, dtype).tobytes() for expert in weight)
    again = unpack_experts(packed, 3, 20, 24, dtype)
    assert np.array_equal(again.astype(np.float32), weight.astype(np.float32))


def test_a_block_is_one_cell_a_column():
    """The documented places of k in column 5's cell of the second block."""
    column, first = 5, BLOCK + 5 * 4
    bf16 = np.zeros((PANEL, 4), NUMPY_DTYPES["bf16"])
    bf16[column, 2:] = [1, 2]
    assert pack(bf16, "bf16")[first : first + 4].view(np.uint16).tolist() == [0x3F80, 0x4000]
    i8 = np.zeros((PANEL, 8), np.int8)
    i8[column, 4:] = [1, 2, 3, -128]
    assert pack(i8, "i8")[first : first + 4].tolist() == [129, 131, 130, 0]
    i4 = np.zeros((PANEL, 16), np.int8)
    i4[column, 8:] = [1, 2, 3, 4, 5, 6, 7, -8]
    cell = pack(i4.astype(NUMPY_DTYPES["i4"]), "i4")[first : first + 4].tolist()
    assert cell == [0x9 | 0xD0, 0xB | 0xF0, 0xA | 0xE0, 0xC | 0x00]


def test_six_bits_are_two_blocks_of_nibbles_and_one_of_pairs() -> None:
    """Written out for column 5 of the second block."""
    column, first = 5, 3 * BLOCK + 5 * 4
    codes = [17, 2, 35, 63, 0, 16, 48, 5, 33, 34, 18, 19, 62, 47, 1, 32]
    weight = np.zeros((PANEL, 32), np.int8)
    weight[column, 16:] = np.array(codes) - 32
    packed = pack(weight, "i6")
    assert packed.nbytes == packed_bytes(PANEL, 32, "i6") == PANEL * 32 * 6 // 8
    lines = [packed[first + line * BLOCK :][:4].tolist() for line in range(3)]
    order = (0, 2, 1, 3)
    for half in (0, 1):
        of = codes[8 * half :]
        assert lines[half] == [of[k] % 16 + of[4 + k] % 16 * 16 for k in order]
    assert lines[2] == [sum(codes[4 * i + k] // 16 << 2 * i for i in range(4)) for k in order]


@pytest.mark.parametrize("code", [-33, 32])
def test_codes_of_more_than_six_bits_are_refused(code: int) -> None:
    with pytest.raises(AssertionError):
        pack(np.full((1, 16), code, np.int8), "i6")


def test_planes_are_the_high_and_the_low_nibbles() -> None:
    every = np.arange(-MOST_IN_PLANES, MOST_IN_PLANES + 1, dtype=np.int8)
    weight = np.resize(every, (20, 24))
    packed = pack_planes(weight)
    assert packed.nbytes == 2 * packed_bytes(20, 24, "i4")
    assert np.array_equal(unpack_planes(packed, 20, 24), weight)
    coarse = unpack(packed[: packed.nbytes // 2], 20, 24, "i4").astype(np.int16)
    assert np.abs(weight - 16 * coarse).max() <= 8
    assert not coarse[np.abs(weight) < 8].any()


@pytest.mark.parametrize("weight", [np.full((1, 8), 120, np.int8), np.zeros((1, 4), np.int8)])
def test_planes_take_small_codes_and_whole_blocks(weight: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        pack_planes(weight)


def test_nan_weights_are_refused():
    weight = np.array([[0x00, 0xFF]], np.uint8).view(NUMPY_DTYPES["f8e4m3"])
    with pytest.raises(CheckpointError, match="NaN"):
        pack(weight, "f8e4m3")


@given(num_columns=st.integers(1, 50), groups=st.integers(1, 5), seed=st.integers(0, 9))
def test_scales_follow_their_panels(num_columns, groups, seed):
    scales = np.random.default_rng(seed).standard_normal((num_columns, groups))
    packed = pack_columns(scales)
    assert packed.shape == scales.shape
    for panel in range(0, num_columns, PANEL):
        mine = scales[panel : panel + PANEL]
        assert np.array_equal(packed.reshape(-1)[panel * groups :][: mine.size], mine.T.reshape(-1))
    assert np.array_equal(unpack_columns(packed), scales)
    experts = np.stack([scales, -scales])
    assert np.array_equal(unpack_columns(pack_columns(experts)), experts)
