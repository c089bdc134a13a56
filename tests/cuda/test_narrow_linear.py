"""Linears with 4-bit weights in tiles, or int8 ones: the CUDA C++ kernel on the CPU, against the
reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support import cuda_on_cpu
from tests.support.kernels import KernelCall, assert_close
from tests.support.linear_calls import Case, linear_call, take_rows
from tests.support.lowered import site_of
from tests.support.triton_kernels import needs_triton
from tests.support.weights import in_memory
from trtc.plugins.cuda.cpp import CudaSource
from trtc.plugins.cuda.launch import DIMS, Launch
from trtc.plugins.rounding import NUMPY_DTYPES

needs_triton()

from trtc.plugins.linear import cuda_narrow  # noqa: E402
from trtc.plugins.linear.narrow_tactics import Few  # noqa: E402

TILES: dict[str, Any] = {"layout": "tiles"}
ROWS: dict[str, Any] = {"layout": "row_major"}
CASES = [
    (Case("bf16", "i4", 64, 512, 128, **TILES), Few(8, 1, 2, 2, 3)),
    (Case("bf16", "i4", 80, 384, **TILES, bias=True, out="f32"), Few(1, 2, 1, 2, 2)),
    (Case("bf16", "u4", 48, 640, 128, zero=True, **TILES, residual=True), Few(4, 1, 2, 4, 3)),
    (Case("bf16", "u4", 32, 256, 64, zero=True, **TILES, softcap=2.0), Few(8, 1, 1, 1, 2)),
    (Case("bf16", "i4", 48, 256, 32, **TILES), Few(16, 1, 3, 2, 4)),
    (Case("bf16", "u4", 32, 512, 256, **TILES), Few(16, 2, 1, 2, 2)),
    (Case("bf16", "u4", 32, 768, 128, zero=True, **TILES), Few(8, 1, 1, 2, 2, 2)),
    (Case("bf16", "i4", 32, 256, 32, **TILES, residual=True, out="f32"), Few(8, 1, 2, 1, 4)),
    (Case("bf16", "i4", 64, 512, 128, **TILES, out="f32"), Few(1, 1, 2, 2, 3, digits=True)),
    (Case("bf16", "i4", 64, 640, 128, **TILES, bias=True), Few(2, 2, 2, 2, 3, digits=True)),
    (Case("bf16", "u4", 48, 768, 256, zero=True, **TILES), Few(4, 1, 1, 3, 2, digits=True)),
    (Case("bf16", "u4", 32, 512, **TILES, residual=True), Few(1, 2, 1, 1, 2, 2, digits=True)),
    (Case("bf16", "i8", 48, 512, 128, **ROWS, out="f32"), Few(1, 1, 3, 2, 3)),
    (Case("bf16", "i8", 80, 384, **ROWS, bias=True, residual=True), Few(8, 2, 1, 3, 2)),
    (Case("bf16", "i8", 32, 768, 256, **ROWS, softcap=2.0, out="f32"), Few(16, 1, 1, 2, 3, 2)),
]
GUARD = 24
STALE = 2


def run(call: KernelCall, few: Few, *, lazy: bool, in_place: bool = False) -> np.ndarray:
    """`out` of the kernel with the tactic `few`, in a bucket of STALE rows more than there are.

    Args:
        in_place: the residual lies where `out` comes.
    """
    rows = len(call.inputs["x"])
    site = replace(site_of(call, "tokens", 90), strides=aligned_strides(call))
    (launch,) = (
        part
        for variant in cuda_narrow.few_variants(site, [few])
        for part in variant.work
        if isinstance(part, Launch)
    )
    dtype = NUMPY_DTYPES[site.dtypes["out"]]
    out = cuda_on_cpu.poisoned((rows + STALE, site.strides["out"]), dtype)
    arrays = {
        name: with_stride(array, site.strides[name], STALE) if name in ("x", "residual") else array
        for name, array in in_memory(call).inputs.items()
        if array is not None
    }
    arrays |= {"out": out, DIMS: np.array([rows, 0, 0, 0], np.int32)}
    columns = int(call.attributes["N"])
    if in_place:
        out[:rows, :columns] = arrays["residual"][:rows, :columns]
    assert isinstance(launch.kernel, CudaSource)
    given = [np.ascontiguousarray(arrays[name]) for name in launch.arguments]
    if in_place:
        given[launch.arguments.index("residual")] = given[launch.arguments.index("out")]
    late = [
        array
        for name, array in zip(launch.arguments, given, strict=True)
        if name == "x" or (name == "residual" and not in_place)
    ]
    cuda_on_cpu.launch(launch.kernel, given, (launch.grid[0].times, 1, 1), lazy=lazy, late=late)
    out = given[launch.arguments.index("out")]
    untouched = [out[:, columns:], out[rows:]]
    assert all((np.ascontiguousarray(part).view(np.uint8) == 0xFF).all() for part in untouched)
    return np.ascontiguousarray(out[:rows, :columns])


def aligned_strides(call: KernelCall) -> dict[str, int]:
    """Rows begin at multiples of 16 bytes."""
    strides = {"x": call.inputs["x"].shape[1] + 32, "out": int(call.attributes["N"]) + GUARD}
    return {**strides, "residual": strides["out"]}


def with_stride(array: np.ndarray, stride: int, stale: int) -> np.ndarray:
    buffer = cuda_on_cpu.poisoned((len(array) + stale, stride), array.dtype)
    buffer[: len(array), : array.shape[1]] = array
    return buffer


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("case", "few"), CASES, ids=lambda part: str(part))
def test_kernel_agrees_with_reference(case: Case, few: Few, lazy: bool) -> None:
    call = linear_call(np.random.default_rng(5), case, rows=few.rows)
    assert_close(call, {"out": run(call, few, lazy=lazy)})


@pytest.mark.parametrize("few", [Few(2, 1, 3, 2, 3), Few(1, 1, 3, 1, 2, 2)], ids=str)
def test_a_residual_that_the_result_replaces_is_added_once(few: Few) -> None:
    """80 rows of the weight are not whole blocks of 48."""
    case = Case("bf16", "i4", 80, 512, 128, **TILES, residual=True)
    call = linear_call(np.random.default_rng(7), case, rows=few.rows)
    assert_close(call, {"out": run(call, few, lazy=False, in_place=True)})


DIGITS = Case("bf16", "u4", 48, 512, 128, zero=True, **TILES, out="f32")


def test_digits_take_numbers_of_any_size() -> None:
    call = linear_call(np.random.default_rng(8), DIGITS, rows=2)
    x = call.inputs["x"]
    assert x is not None
    x[0, :128] = (x[0, :128].astype(np.float32) * 1e30).astype(x.dtype)
    x[0, 128:256] = 0
    x[1, :384] = (x[1, :384].astype(np.float32) * 1e-30).astype(x.dtype)
    x[1, 384:] = 0
    x[1, 384:386] = 1.0, 2.0**-20
    few = Few(2, 1, 3, 2, 3, digits=True)
    assert_close(call, {"out": run(call, few, lazy=True)})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_digits_keep_what_is_not_a_number_in_its_row(value: float) -> None:
    few = Few(2, 1, 3, 2, 3, digits=True)
    call = linear_call(np.random.default_rng(9), DIGITS, rows=2)
    expected = run(call, few, lazy=True)[1]
    x = call.inputs["x"]
    assert x is not None
    x[0, 130] = value
    found = run(call, few, lazy=True)
    assert np.isnan(found[0]).all()
    assert found[1].tobytes() == expected.tobytes()


@pytest.mark.parametrize(("case", "few"), CASES[4:11:3], ids=lambda part: str(part))
def test_a_row_does_not_depend_on_the_others_nor_on_the_most_there_may_be(
    case: Case, few: Few
) -> None:
    call = linear_call(np.random.default_rng(6), case, rows=few.rows)
    whole = run(call, few, lazy=False)
    for rows in (slice(0, 1), slice(few.rows // 2, few.rows)):
        part = take_rows(call, rows)
        assert run(part, few, lazy=True).tobytes() == whole[rows].tobytes()
        more = replace(few, rows=2 * few.rows)
        assert run(part, more, lazy=True).tobytes() == whole[rows].tobytes()
