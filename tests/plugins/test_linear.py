"""The linear kernel against its reference, and against itself in other company."""

from dataclasses import dataclass, replace
from typing import Any

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
from tests.support.operands import random_array, scalar
from tests.support.weights import in_memory, random_scales, random_weight, stored
from trtc.plugins.linear.op import LINEAR
from trtc.plugins.rounding import NUMPY_DTYPES

ROWS = 33


@dataclass(frozen=True)
class Case:
    """One kind of linear. The sizes go over the edges of panels, blocks, groups and ranges."""

    x: str
    weight: str
    columns: int
    depth: int
    group: int = 0
    zero: bool = False
    activation: str = "exact"
    layout: str = "packed"
    input_scale: bool = False
    bias: bool = False
    residual: bool = False
    softcap: float = 0.0
    out: str = "bf16"

    def __str__(self) -> str:
        kind = f"{self.x}x{self.weight}-{self.columns}x{self.depth}"
        return f"{kind}-{self.activation}-{self.layout}" + ("-zero" if self.zero else "")


CASES = [
    Case("f32", "f32", 1, 1, out="f32"),
    Case("f32", "f32", 80, 131, bias=True, residual=True, out="f32"),
    Case("f32", "f32", 17, 300, softcap=3.0, out="f32", layout="row_major"),
    Case("bf16", "bf16", 1, 3),
    Case("bf16", "bf16", 17, 64, out="f32", softcap=2.0),
    Case("bf16", "bf16", 100, 521, bias=True, residual=True),
    Case("bf16", "bf16", 33, 31, layout="row_major"),
    Case("bf16", "f8e4m3", 17, 270, input_scale=True),
    Case("f8e4m3", "f8e4m3", 100, 521, input_scale=True, bias=True),
    Case("f8e4m3", "f8e4m3", 16, 5, input_scale=True, out="f32", layout="row_major"),
    Case("bf16", "i8", 70, 261, residual=True),
    Case("i8", "i8", 80, 1030, input_scale=True, residual=True),
    Case("i8", "i8", 17, 7, input_scale=True, bias=True, out="f32", layout="row_major"),
    Case("bf16", "i4", 97, 136, 32, bias=True),
    Case("bf16", "i4", 16, 40, layout="row_major"),
    Case("bf16", "u4", 64, 200, 64, zero=True),
    Case("bf16", "u4", 16, 64, 16, zero=True, layout="row_major"),
    Case("bf16", "i4", 80, 2056, 128, activation="dynamic_i8", residual=True),
    Case("bf16", "i4", 17, 72, activation="dynamic_i8", out="f32"),
    Case("bf16", "i4", 17, 48, 16, activation="dynamic_i8", layout="row_major"),
    Case("bf16", "u4", 100, 136, 32, zero=True, activation="dynamic_i8", bias=True),
    # For the references of narrow schemes in fp32 graphs.
    Case("f32", "f8e4m3", 17, 33, out="f32"),
    Case("f32", "i8", 16, 12, out="f32"),
    Case("f32", "i4", 16, 64, 32, out="f32"),
    Case("f32", "u4", 16, 64, 32, zero=True, out="f32"),
]


def linear_call(rng: np.random.Generator, case: Case, rows: int = ROWS) -> KernelCall:
    """x and residual are columns of wider matrices, as the plan's views are."""
    if case.x == "i8":
        x = rng.integers(-128, 128, (rows, case.depth + 5)).astype(np.int8)
    else:
        x = random_array(rng, rows, case.depth + 5, dtype=case.x)
    weight = random_weight(rng, case.columns, case.depth, dtype=case.weight)
    inputs: dict[str, Any] = {
        "x": x[:, 3 : 3 + case.depth],
        "weight": stored(weight, case.weight, case.layout),
    }
    if case.weight not in ("f32", "bf16"):
        inputs["weight_scale"] = random_scales(
            rng, case.columns, depth=case.depth, group=case.group, dtype=case.weight, x_dtype=case.x
        )
    if case.zero:
        shape = inputs["weight_scale"].shape
        inputs["weight_zero"] = rng.integers(0, 16, shape).astype(np.uint8)
    if case.input_scale:
        inputs["input_scale"] = scalar(0.75)
    if case.bias:
        inputs["bias"] = random_array(rng, case.columns)
    if case.residual:
        residual = random_array(rng, rows, case.columns + 9, dtype=case.out)
        inputs["residual"] = residual[:, 2 : 2 + case.columns]
    attributes: dict[str, int | float | str] = {
        "N": case.columns,
        "group_size": case.group,
        "weight_dtype": case.weight,
        "layout": case.layout,
        "activation": case.activation,
        "softcap": case.softcap,
        "out_dtype": case.out,
    }
    return KernelCall(LINEAR, attributes, inputs)


def take_rows(call: KernelCall, rows: slice) -> KernelCall:
    """The same call with some of its rows."""
    varying = {
        name: array[rows]
        for name, array in call.inputs.items()
        if name in ("x", "residual") and array is not None
    }
    return replace(call, inputs={**call.inputs, **varying})


CALLS = [linear_call(np.random.default_rng(40 + i), case) for i, case in enumerate(CASES)]
EVERY_CODE = Case("bf16", "f8e4m3", 254, 1, out="f32")
EXTREMES = Case("i8", "i8", 16, 2049, input_scale=True, out="f32")


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


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return compile_kernels(
        [in_memory(call) for call in [*CALLS, every_code_call(), extremes_call()]], request.param
    )


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
