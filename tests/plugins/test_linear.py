"""The linear kernel against its reference, and against itself in other batches."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels import (
    KernelCall,
    KernelLibrary,
    assert_close,
    available_isas,
    compile_kernels,
)
from tests.support.linear_calls import CASES, Case, linear_call, take_rows
from tests.support.operands import random_array
from tests.support.weights import in_memory, stored, stored_groups
from trtc.builder.targets.cpu import CpuTarget
from trtc.plugins.iq4 import VALUES
from trtc.plugins.layouts import unpack, unpack_columns
from trtc.plugins.linear.op import LINEAR
from trtc.plugins.products import e8m0_values
from trtc.plugins.rounding import NUMPY_DTYPES

CALLS = [linear_call(np.random.default_rng(40 + i), case) for i, case in enumerate(CASES)]
EVERY_CODE = Case("bf16", "f8e4m3", 254, 1, out="f32")
EXTREMES = Case("i8", "i8", 16, 2049, input_scale=True, out="f32")
E2M1_EXTREMES = Case("bf16", "f4e2m1", 16, 264, 32, powers=True, activation="dynamic_i8", out="f32")
IQ4_EXTREMES = Case("bf16", "iq4", 16, 264, 32, bytes=True, activation="dynamic_i8", out="f32")
SIX_BIT_EXTREMES = Case("bf16", "i6", 16, 272, 128, activation="dynamic_i8", out="f32")
NIBBLE_EXTREMES = Case("bf16", "i4", 16, 264, 128, activation="dynamic_i8", out="f32")


def every_code_call() -> KernelCall:
    """1.0 by every E4M3 value there is, NaN left out."""
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    call = linear_call(np.random.default_rng(0), EVERY_CODE, rows=2)
    weight = stored(codes.view(NUMPY_DTYPES["f8e4m3"])[:, None], "f8e4m3", "packed")
    ones = np.ones((2, 1), NUMPY_DTYPES["bf16"])
    scales = np.ones((254, 1), np.float32)
    return replace(call, inputs={"x": ones, "weight": weight, "weight_scale": scales})


def extremes_call() -> KernelCall:
    """Sums of int8 products that pass 2^31 while the weights still carry their offset."""
    call = linear_call(np.random.default_rng(0), EXTREMES, rows=3)
    x = np.array([[-128], [127], [-128]], np.int8).repeat(2049, axis=1)
    weight = np.full((16, 2049), 127, np.int8)
    weight[1::2] = -128
    inputs = {**call.inputs, "x": x, "weight": stored(weight, "i8", "packed")}
    return replace(call, inputs=inputs)


def nibble_extremes_call() -> KernelCall:
    """Codes of 15 or 0 by int8 of 127 or -127: what sums of fewer bits would overflow by."""
    call = linear_call(np.random.default_rng(0), NIBBLE_EXTREMES, rows=3)
    x = np.array([[-1], [1], [-1]], NUMPY_DTYPES["bf16"]).repeat(264, axis=1)
    weight = np.full((16, 264), 7, NUMPY_DTYPES["i4"])
    weight[1::2] = -8
    scales = stored_groups(np.ones((16, 3), np.float32), "packed")
    inputs = {"x": x, "weight": stored(weight, "i4", "packed"), "weight_scale": scales}
    return replace(call, inputs=inputs)


def iq4_extremes_call() -> KernelCall:
    """The largest number or the least by int8 of 127 or -127: as bytes of 7 bits, 125 and 0."""
    call = linear_call(np.random.default_rng(0), IQ4_EXTREMES, rows=3)
    x = np.array([[-1], [1], [-1]], NUMPY_DTYPES["bf16"]).repeat(264, axis=1)
    weight = np.full((16, 264), 15, NUMPY_DTYPES["u4"])
    weight[1::2] = 0
    scales = stored_groups(np.full((16, 9), 112, np.uint8), "packed")
    inputs = {"x": x, "weight": stored(weight, "iq4", "packed"), "weight_scale": scales}
    return replace(call, inputs={**inputs, "scale_unit": np.ones(16, np.float32)})


def e2m1_extremes_call() -> KernelCall:
    """The same of 6 and -6: as bytes 24 and 0. Groups have the least of E8M0 scales, and 1."""
    call = linear_call(np.random.default_rng(0), E2M1_EXTREMES, rows=3)
    x = np.array([[-1], [1], [-1]], NUMPY_DTYPES["bf16"]).repeat(264, axis=1)
    weight = np.full((16, 264), 6, NUMPY_DTYPES["f4e2m1"])
    weight[1::2] = -6
    scales = np.full((16, 9), 127, np.uint8)
    scales[:, 1] = 0
    inputs = {"weight": stored(weight, "f4e2m1", "packed"), "x": x}
    return replace(call, inputs={**inputs, "weight_scale": stored_groups(scales, "packed")})


def as_int8(call: KernelCall) -> KernelCall:
    """The same weights doubled, in int8, with half the scales in f32."""
    dtype, shape = call.attributes["weight_dtype"], call.inputs["x"].shape
    assert dtype == "f4e2m1" and call.attributes["layout"] == "packed"
    weight = unpack(call.inputs["weight"], int(call.attributes["N"]), shape[1], dtype)
    doubled = (2 * weight.astype(np.float32)).astype(np.int8)
    scales = unpack_columns(call.inputs["weight_scale"])
    if "scale_unit" in call.inputs:
        values = scales.view(NUMPY_DTYPES["f8e4m3"]).astype(np.float32)
        values = values * call.inputs["scale_unit"][:, None]
    else:
        values = e8m0_values(scales)
    inputs = {name: one for name, one in call.inputs.items() if name != "scale_unit"}
    inputs |= {"weight": stored(doubled, "i8", "packed")}
    inputs |= {"weight_scale": stored_groups(values / np.float32(2), "packed")}
    attributes = {**call.attributes, "weight_dtype": "i8"}
    return replace(call, inputs=inputs, attributes=attributes)


E2M1_CALLS = {
    str(case): call
    for call, case in zip(CALLS, CASES, strict=True)
    if (case.weight, case.layout) == ("f4e2m1", "packed") and (case.bytes or case.powers)
}


def six_bit_extremes_call() -> KernelCall:
    """The same of 31 and -32: as bytes 63 and 0."""
    call = linear_call(np.random.default_rng(0), SIX_BIT_EXTREMES, rows=3)
    x = np.array([[-1], [1], [-1]], NUMPY_DTYPES["bf16"]).repeat(272, axis=1)
    weight = np.full((16, 272), 31, np.int8)
    weight[1::2] = -32
    scales = stored_groups(np.ones((16, 3), np.float32), "packed")
    inputs = {"x": x, "weight": stored(weight, "i6", "packed"), "weight_scale": scales}
    return replace(call, inputs=inputs)


@functools.cache
def library_of(isa: str) -> KernelLibrary:
    extremes = (
        *(every_code_call(), extremes_call(), nibble_extremes_call()),
        *(iq4_extremes_call(), six_bit_extremes_call(), e2m1_extremes_call()),
    )
    int8 = map(as_int8, E2M1_CALLS.values())
    return compile_kernels([in_memory(call) for call in (*CALLS, *extremes, *int8)], isa)


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return library_of(request.param)


@pytest.mark.parametrize("call", CALLS, ids=[str(case) for case in CASES])
def test_kernel_agrees_with_reference(library, call):
    assert_close(call, library.run(in_memory(call), num_threads=2))


@pytest.mark.parametrize("call", CALLS, ids=[str(case) for case in CASES])
def test_a_row_does_not_depend_on_the_others_nor_on_threads(library, call):
    """Every height of tile, several tiles, and a row's place in them: the same bits."""
    call = in_memory(call)
    whole = library.run(call, num_threads=1)["out"]
    assert library.run(call, num_threads=3)["out"].tobytes() == whole.tobytes()
    for rows in (1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 16, 17):
        some = library.run(take_rows(call, slice(4, 4 + rows)), num_threads=1 + rows % 2)["out"]
        assert some.tobytes() == whole[4 : 4 + rows].tobytes(), rows


def test_optimisation_changes_no_bit():
    """Of floats, of weights widened in registers and of bytes, as engines are compiled."""
    kinds = ("bf16xbf16-100x521", "bf16xu4-64x200", "bf16xiq4-97x1096", "bf16xi6-97x1160")
    calls = [
        in_memory(call)
        for call, case in zip(CALLS, CASES, strict=True)
        if str(case).startswith(kinds)
    ]
    assert len(calls) == len(kinds)
    isa = available_isas()[-1]
    shipped = compile_kernels(calls, isa, CpuTarget.optimization)
    for call in calls:
        expected = library_of(isa).run(call)["out"]
        assert shipped.run(call)["out"].tobytes() == expected.tobytes()


def test_many_rows_go_in_chunks(library):
    """More rows than a chunk holds: as the same rows alone."""
    case = CASES[5]
    many = linear_call(np.random.default_rng(45), case, rows=600)
    many = replace(
        many, inputs={**CALLS[5].inputs, **{n: many.inputs[n] for n in ("x", "residual")}}
    )
    whole = library.run(many, num_threads=2)["out"]
    for row in (0, 279, 280, 281, 599):
        alone = library.run(take_rows(many, slice(row, row + 1)))["out"]
        assert alone.tobytes() == whole[row : row + 1].tobytes()


def test_every_e4m3_value_is_exact(library):
    call = every_code_call()
    out = library.run(call)["out"]
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    expected = codes.view(NUMPY_DTYPES["f8e4m3"]).astype(np.float32)
    assert np.array_equal(out, np.stack([expected, expected]))


def test_int8_sums_are_exact(library):
    call = extremes_call()
    assert np.array_equal(library.run(call)["out"], call.reference()["out"])


def test_sums_of_the_largest_nibbles_do_not_overflow(library):
    out = library.run(in_memory(nibble_extremes_call()))["out"]
    columns = np.where(np.arange(16) % 2, -8, 7) * 264
    assert np.allclose(out, np.array([[-1], [1], [-1]]) * columns, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "least", "most"),
    [(iq4_extremes_call(), VALUES[0], VALUES[-1]), (six_bit_extremes_call(), -32, 31)],
    ids=["iq4", "i6"],
)
def test_sums_of_the_largest_codes_do_not_overflow(library, call, least, most):
    out = library.run(in_memory(call))["out"]
    columns = np.where(np.arange(16) % 2, least, most) * call.inputs["x"].shape[1]
    assert np.allclose(out, np.array([[-1], [1], [-1]]) * columns, rtol=1e-6)


def test_sums_of_the_largest_e2m1_numbers_and_the_least_scale(library):
    call = e2m1_extremes_call()
    out = library.run(in_memory(call))["out"]
    columns = np.where(np.arange(16) % 2, -6, 6) * (264 - 32 + 32 * 2.0**-127)
    assert np.allclose(out, np.array([[-1], [1], [-1]]) * columns, rtol=1e-6)


@pytest.mark.parametrize("call", E2M1_CALLS.values(), ids=E2M1_CALLS)
def test_e2m1_weights_give_the_bits_of_int8_ones(library, call):
    """Units are powers of two here: all that differs are factors that are."""
    expected = library.run(in_memory(as_int8(call)))["out"]
    assert library.run(in_memory(call))["out"].tobytes() == expected.tobytes()


def test_nan_activations_stay_in_their_row(library):
    index = next(i for i, case in enumerate(CASES) if case.x == "f8e4m3")
    call = CALLS[index]
    x = call.inputs["x"].copy()
    x[1, 0] = np.nan
    out = library.run(replace(call, inputs={**call.inputs, "x": x}))["out"]
    clean = library.run(call)["out"]
    assert np.isnan(out[1].astype(np.float32)).all()
    assert np.delete(out, 1, 0).tobytes() == np.delete(clean, 1, 0).tobytes()


def test_reference_is_a_linear_layer():
    rng = np.random.default_rng(3)
    x, weight, bias = random_array(rng, 5, 12), random_array(rng, 7, 12), random_array(rng, 7)
    call = KernelCall(
        LINEAR,
        {"N": 7, "weight_dtype": "f32", "out_dtype": "f32"},
        {"x": x, "weight": weight, "bias": bias},
    )
    expected = F.linear(torch.tensor(x), torch.tensor(weight), torch.tensor(bias))
    np.testing.assert_allclose(call.reference()["out"], expected.numpy(), atol=1e-5)


def test_dynamic_int8_is_near_exact():
    """Rounding x to int8 by groups moves a sum of products by less than a percent of its size."""
    case = Case("bf16", "i4", 32, 512, 128, out="f32")
    call = linear_call(np.random.default_rng(9), case)
    rounded = replace(call, attributes={**call.attributes, "activation": "dynamic_i8"})
    exact, dynamic = (c.reference()["out"] for c in (call, rounded))
    error = np.abs(exact - dynamic).mean() / np.abs(exact).mean()
    assert 0 < error < 0.01
