"""Scalar and vector conversions against ml_dtypes, and the vector functions against numpy."""

import ctypes
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tests.support.kernels import Array, available_isas, build
from trtc.plugins.rounding import NUMPY_DTYPES, cast

SOURCE = """
#include "cpu/vector.hpp"
using namespace trtc;
template <class T> void scalar_to(const float* from, T* to, long n) {
  for (long i = 0; i < n; ++i) to[i] = from_float<T>(from[i]);
}
template <class T> void vector_to(const float* from, T* to, long n) {
  for_vectors(n, [&](long i, auto m) { store(to + i, load(from + i, m), m); });
}
template <class T> void scalar_from(const T* from, float* to, long n) {
  for (long i = 0; i < n; ++i) to[i] = to_float(from[i]);
}
template <class T> void vector_from(const T* from, float* to, long n) {
  for_vectors(n, [&](long i, auto m) { store(to + i, load(from + i, m), m); });
}
extern "C" {
void scalar_to_bf16(const float* a, bf16* b, long n) { scalar_to(a, b, n); }
void vector_to_bf16(const float* a, bf16* b, long n) { vector_to(a, b, n); }
void scalar_to_f8e4m3(const float* a, f8e4m3* b, long n) { scalar_to(a, b, n); }
void vector_to_f8e4m3(const float* a, f8e4m3* b, long n) { vector_to(a, b, n); }
void scalar_to_i8(const float* a, std::int8_t* b, long n) { scalar_to(a, b, n); }
void vector_to_i8(const float* a, std::int8_t* b, long n) { vector_to(a, b, n); }
void scalar_from_bf16(const bf16* a, float* b, long n) { scalar_from(a, b, n); }
void vector_from_bf16(const bf16* a, float* b, long n) { vector_from(a, b, n); }
void scalar_from_f8e4m3(const f8e4m3* a, float* b, long n) { scalar_from(a, b, n); }
void vector_from_f8e4m3(const f8e4m3* a, float* b, long n) { vector_from(a, b, n); }
void rounded_bf16(const float* a, float* b, long n) {
  for_vectors(n, [&](long i, auto m) { store(b + i, rounded<bf16>(load(a + i, m)), m); });
}
void vector_exp(const float* a, float* b, long n) {
  for_vectors(n, [&](long i, auto m) { store(b + i, trtc::exp(load(a + i, m)), m); });
}
void vector_tanh(const float* a, float* b, long n) {
  for_vectors(n, [&](long i, auto m) { store(b + i, trtc::tanh(load(a + i, m)), m); });
}
int lanes() { return kLanes; }
void transposed(const std::uint32_t* a, std::uint32_t* b) {
  Words rows[kLanes];
  std::memcpy(rows, a, sizeof rows);
  transpose(rows);
  std::memcpy(b, rows, sizeof rows);
}
float vector_sum(const float* a) { return trtc::sum(load(a)); }
float vector_largest(const float* a) { return trtc::largest(load(a)); }
}
"""


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(SOURCE, request.param)))


def convert(function: Callable[..., None], values: Array, dtype: str) -> Array:
    out = np.full(values.shape, 0xA5, np.uint8).astype(NUMPY_DTYPES[dtype])
    function(
        ctypes.c_void_p(values.ctypes.data),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_long(values.size),
    )
    return out


def bits(values: Array) -> Array:
    return values.view(f"u{values.itemsize}")


def interesting_floats() -> Array:
    """Every bf16 value, its neighbours in fp32, and every tie between E4M3 and int8 values."""
    codes = np.arange(1 << 16, dtype=np.uint32)
    bf16 = (codes[codes & 0x7F80 != 0x7F80] << 16).view(np.float32)
    e4m3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = np.concatenate([(e4m3[1:] + e4m3[:-1]) / 2, np.arange(-300, 300) / np.float32(2)])
    exact = np.concatenate([bf16, ties, -ties]).astype(np.float32)
    beside = [np.nextafter(exact, np.float32(way)) for way in (-np.inf, np.inf)]
    odd = np.array([np.inf, -np.inf], np.float32)
    return np.concatenate([exact, *beside, odd]).astype(np.float32)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3", "i8"])
def test_rounding_is_exact_for_every_bf16_and_every_tie(library, kind, dtype):
    values = interesting_floats()
    actual = convert(library[f"{kind}_to_{dtype}"], values, dtype)
    with np.errstate(over="ignore"):
        expected = cast(values, dtype)
    assert np.array_equal(bits(actual), bits(expected))


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_nan_stays_nan(library, kind):
    values = np.array([np.nan, -np.nan, 1.0], np.float32)
    for dtype in ("bf16", "f8e4m3"):
        actual = convert(library[f"{kind}_to_{dtype}"], values, dtype).astype(np.float32)
        assert np.isnan(actual).tolist() == [True, True, False]
    assert convert(library[f"{kind}_to_i8"], values, "i8").tolist() == [-128, -128, 1]


@pytest.mark.parametrize("kind", ["scalar", "vector"])
@pytest.mark.parametrize(("dtype", "width"), [("f8e4m3", 8), ("bf16", 16)])
def test_every_code_widens_exactly(library, kind, dtype, width):
    codes = np.arange(1 << width, dtype=f"u{width // 8}").view(NUMPY_DTYPES[dtype])
    actual = convert(library[f"{kind}_from_{dtype}"], codes, "f32")
    expected = codes.astype(np.float32)
    assert np.array_equal(np.isnan(actual), np.isnan(expected))
    finite = ~np.isnan(expected)
    assert np.array_equal(bits(actual)[finite], bits(expected)[finite])


def test_rounding_in_place_is_the_same_rounding(library):
    values = interesting_floats()
    with np.errstate(over="ignore"):
        expected = cast(values, "bf16").astype(np.float32)
    assert np.array_equal(bits(convert(library.rounded_bf16, values, "f32")), bits(expected))


def test_exp_is_within_two_ulp(library):
    x = np.concatenate([np.linspace(-87.2, 88.2, 200_003), np.linspace(-1e-3, 1e-3, 1001)])
    x = x.astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    error = np.abs(convert(library.vector_exp, x, "f32") - expected)
    assert (error / np.spacing(expected.astype(np.float32))).max() < 2


def test_exp_of_the_extremes(library):
    x = np.array([-np.inf, -1e9, -88, 0, -0.0, 89, np.inf, np.nan], np.float32)
    expected = np.array([0, 0, 0, 1, 1, np.inf, np.inf, np.nan], np.float32)
    assert np.array_equal(convert(library.vector_exp, x, "f32"), expected, equal_nan=True)


def test_tanh(library):
    x = np.concatenate([np.linspace(-12, 12, 100_001), [-1e5, 1e5, -np.inf, np.inf]])
    x = x.astype(np.float32)
    error = np.abs(convert(library.vector_tanh, x, "f32") - np.tanh(x.astype(np.float64)))
    assert error.max() < 3e-7


def test_vector_lengths_do_not_change_values(library):
    """A shorter last vector computes what a full one does and touches nothing else."""
    values = np.linspace(-500, 500, 67, dtype=np.float32)
    whole = convert(library.vector_to_f8e4m3, values, "f8e4m3")
    for count in range(1, 67):
        out = np.full(67, 0x55, np.uint8)
        library.vector_to_f8e4m3(
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_void_p(out.ctypes.data),
            ctypes.c_long(count),
        )
        assert np.array_equal(out[:count], bits(whole)[:count])
        assert (out[count:] == 0x55).all()


def test_transpose_and_reductions(library):
    lanes = library.lanes()
    square = np.arange(lanes * lanes, dtype=np.uint32).reshape(lanes, lanes)
    out = np.zeros_like(square)
    library.transposed(ctypes.c_void_p(square.ctypes.data), ctypes.c_void_p(out.ctypes.data))
    assert np.array_equal(out, square.T)
    values = np.random.default_rng(0).permutation(lanes).astype(np.float32)
    for name, expected in (("vector_sum", values.sum()), ("vector_largest", values.max())):
        function = library[name]
        function.restype = ctypes.c_float
        assert function(ctypes.c_void_p(values.ctypes.data)) == expected
