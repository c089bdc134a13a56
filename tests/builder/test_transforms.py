"""builder/transforms.py."""

import numpy as np
import pytest

from trtc.builder.transforms import Pack, RequantizeToE4M3, ScalePerRow, ZeroPerRow
from trtc.plugins.layouts import unpack
from trtc.plugins.rounding import cast


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_becomes_one_a_row(shape: tuple[int, ...]) -> None:
    rows = ScalePerRow(3)(np.full(shape, 0.25, np.float32))
    assert rows.shape == (3, 1) and rows.dtype == np.float32
    assert (rows == 0.25).all()


def test_scales_by_row_and_group_keep_their_place() -> None:
    by_row = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(ScalePerRow(3)(by_row), by_row[:, None])
    by_group = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(ScalePerRow(3)(by_group), by_group)
    zero = cast(by_group, "u4")
    found = ZeroPerRow(3)(zero)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, by_group.astype(np.uint8))


def test_requantised_weights_are_rounded_where_the_graph_rounds() -> None:
    rng = np.random.default_rng(0)
    weight = cast(rng.integers(0, 16, (4, 8)).astype(np.float32), "u4")
    zero = cast(rng.integers(0, 16, (4, 2)).astype(np.float32), "u4")
    scale = rng.random((4, 2)).astype(np.float32)
    scale_2 = np.array(0.01, np.float32)
    found = RequantizeToE4M3("bf16")(weight, scale, scale_2, zero)
    for row in range(4):
        for column in range(8):
            group = column // 4
            real = (float(weight[row, column]) - float(zero[row, group])) * scale[row, group]
            rounded = cast(np.array(real, np.float32), "bf16").astype(np.float32)
            assert found[row, column] == cast(rounded / scale_2, "f8e4m3")


def test_packing_is_reversible() -> None:
    weight = cast(np.random.default_rng(0).integers(-8, 8, (20, 16)).astype(np.float32), "i4")
    np.testing.assert_array_equal(unpack(Pack("i4")(weight), 20, 16, "i4"), weight)


def test_equal_transforms_are_equal() -> None:
    assert Pack("i4") == Pack("i4") and Pack("i4") != Pack("u4")
    assert ScalePerRow(3) != ScalePerRow(4)
