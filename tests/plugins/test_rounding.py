"""The rounding that every reference rests on."""

import ml_dtypes
import numpy as np
import pytest

from trtc.plugins.rounding import NUMPY_DTYPES, cast, quantize
from trtc.protos.dtypes import DTYPES


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_every_dtype_has_a_numpy_type():
    assert set(NUMPY_DTYPES) == set(DTYPES)


def test_int8_rounds_ties_to_even_and_saturates():
    values = cast(f32(0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -128.5, -1e9), "i8")
    assert values.tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -128, -128]


def test_e4m3_saturates_and_rounds_ties_to_even():
    values = cast(f32(448, 464, 1e9, -np.inf, 17, 19, 2**-10, 3 * 2**-10), "f8e4m3")
    expected = [448, 448, 448, -448, 16, 20, 0, 2**-8]
    assert values.astype(np.float32).tolist() == expected


def test_bf16_overflows_to_infinity():
    assert np.isinf(cast(f32(3.4e38), "bf16").astype(np.float32)).all()


def test_names_of_numpy_work_too():
    x = np.ones(2, ml_dtypes.bfloat16)
    assert cast(f32(1.001, 2), str(x.dtype)).dtype == x.dtype


def test_quantize_rounds_at_each_step_of_the_unfused_graph():
    x, pre, scale = f32(1.0039, 3.3, -7.7), f32(1.01, 0.3, 2.2), np.asarray(0.07, np.float32)
    stepwise = x.astype(ml_dtypes.bfloat16).astype(np.float32) * pre
    stepwise = stepwise.astype(ml_dtypes.bfloat16).astype(np.float32) / scale
    expected = stepwise.astype(ml_dtypes.float8_e4m3fn)
    actual = quantize(x, pre, scale, "f8e4m3", through="bf16")
    assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_quantize_without_scales_is_one_rounding(dtype):
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    assert quantize(x, None, None, dtype, through=dtype).tobytes() == cast(x, dtype).tobytes()
