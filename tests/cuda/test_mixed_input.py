"""Linears with 4-bit weights in tiles, 6-bit or int8 ones: the CUDA C++ kernel on the CPU, against
the reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.kernels import KernelCall, assert_close
from tests.support.linear_calls import Case, linear_call, take_rows
from tests.support.lowered import site_of
from tests.support.triton_kernels import needs_triton

needs_triton()

from tests.support.mixed_input_launch import run_few  # noqa: E402
from trtc.plugins.gemm.mixed_input_tactics import Few  # noqa: E402

TILES: dict[str, Any] = {"layout": "tiles"}
BYTES: dict[str, Any] = {"layout": "tiles", "bytes": True}
POWERS: dict[str, Any] = {"layout": "tiles", "powers": True}
ROWS: dict[str, Any] = {"layout": "row_major"}
SPLIT: dict[str, Any] = {"layout": "split"}
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
    (Case("bf16", "i4", 32, 1280, 128, **TILES), Few(8, 1, 1, 2, 4, early=2)),
    (Case("bf16", "i4", 32, 512, 128, **TILES), Few(1, 1, 2, 2, 2, digits=True, early=1)),
    (Case("bf16", "iq4", 64, 512, 32, **BYTES, out="f32"), Few(1, 1, 2, 2, 3)),
    (Case("bf16", "iq4", 80, 384, 32, **BYTES, bias=True, residual=True), Few(8, 2, 1, 3, 2)),
    (Case("bf16", "f4e2m1", 64, 512, 32, **POWERS, out="f32"), Few(1, 1, 2, 2, 3)),
    (Case("bf16", "f4e2m1", 80, 384, 32, **POWERS, bias=True, residual=True), Few(8, 2, 1, 3, 2)),
    (Case("bf16", "f4e2m1", 64, 512, 32, **BYTES, out="f32"), Few(8, 1, 2, 2, 3)),
    (Case("bf16", "i6", 48, 512, 128, **SPLIT, out="f32"), Few(1, 1, 3, 2, 3)),
    (Case("bf16", "i6", 80, 384, 128, **SPLIT, bias=True, residual=True), Few(8, 2, 1, 3, 2)),
    (Case("bf16", "i6", 32, 768, 256, **SPLIT, softcap=2.0), Few(16, 1, 1, 2, 3, 2)),
    (Case("bf16", "i8", 48, 512, 128, **ROWS, out="f32"), Few(1, 1, 3, 2, 3)),
    (Case("bf16", "i8", 80, 384, **ROWS, bias=True, residual=True), Few(8, 2, 1, 3, 2)),
    (Case("bf16", "i8", 32, 768, 256, **ROWS, softcap=2.0, out="f32"), Few(16, 1, 1, 2, 3, 2)),
]


def run(call: KernelCall, few: Few, *, lazy: bool, in_place: bool = False) -> np.ndarray:
    return run_few(call, site_of(call, "tokens", 90), few, lazy=lazy, in_place=in_place)


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
