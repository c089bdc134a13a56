"""Linears with integer weights by WGMMA: the CUDA C++ kernel on the CPU, against the reference; and
what it compiles to."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.kernels import KernelCall, assert_close
from tests.support.linear_calls import Case, linear_call, take_rows
from tests.support.lowered import site_of
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gemm.mixed_input_tactics import Weight
from trtc.plugins.gpu.lowering import Site, Variant

needs_triton()

from tests.support.compiled import LIMITS, PAGE_SIZE, compiled  # noqa: E402
from tests.support.mixed_input_launch import run_linear  # noqa: E402
from trtc.plugins.gemm.mixed_input_sm90 import Cut, cut_variants, cuts  # noqa: E402
from trtc.plugins.gpu.arch import SM_90  # noqa: E402

TILES: dict[str, Any] = {"layout": "tiles"}
BYTES: dict[str, Any] = {"layout": "tiles", "bytes": True}
POWERS: dict[str, Any] = {"layout": "tiles", "powers": True}
ROWS: dict[str, Any] = {"layout": "row_major"}
CASES = [
    (Case("bf16", "i4", 64, 1024, 128, **TILES), Cut(16, 1), 16),
    (Case("bf16", "i4", 144, 384, 128, **TILES, bias=True, out="f32"), Cut(8, 2), 5),
    (Case("bf16", "u4", 80, 640, 128, zero=True, **TILES, residual=True), Cut(32, 1, 2), 27),
    (Case("bf16", "u4", 48, 512, 64, zero=True, **TILES, softcap=2.0), Cut(16, 1, 1, 2), 9),
    (Case("bf16", "i4", 96, 512, 32, **TILES, residual=True), Cut(16, 1, 2, 2), 16),
    (Case("bf16", "u4", 128, 768, 256, **TILES, residual=True), Cut(64, 2), 50),
    (Case("bf16", "i4", 272, 256, 128, **TILES), Cut(16, 4, row_blocks=2), 30),
    (Case("bf16", "u4", 80, 384, zero=True, **TILES, residual=True), Cut(8, 1, 1, 2, 3), 21),
    (Case("bf16", "i4", 64, 256, 128, **TILES), Cut(128, 1), 100),
    (Case("bf16", "i4", 64, 128, 128, **TILES, bias=True), Cut(16, 1, 4, 2), 10),
    (Case("bf16", "i4", 192, 2560, 128, **TILES), Cut(8, 1), 6),
    (Case("bf16", "iq4", 96, 512, 32, **BYTES, bias=True, residual=True), Cut(16, 1, 2, 2), 16),
    (Case("bf16", "iq4", 80, 256, 32, **BYTES, out="f32"), Cut(8, 1), 5),
    (Case("bf16", "f4e2m1", 96, 512, 32, **POWERS, bias=True, residual=True), Cut(16, 1, 2, 2), 16),
    (Case("bf16", "f4e2m1", 80, 256, 32, **BYTES, out="f32"), Cut(8, 1), 5),
    (Case("bf16", "i8", 80, 640, 128, **ROWS, out="f32"), Cut(16, 1), 12),
    (Case("bf16", "i8", 208, 384, **ROWS, softcap=2.0, out="f32"), Cut(8, 2, row_blocks=2), 11),
    (Case("bf16", "i8", 64, 1024, 256, **ROWS, bias=True, residual=True), Cut(8, 1, 2, 2), 8),
]


def run(
    call: KernelCall, case: Case, cut: Cut, *, lazy: bool, in_place: bool = False
) -> np.ndarray:
    def variants(site: Site) -> Iterator[Variant]:
        return cut_variants(site, weight_of(case), [cut])

    site = site_of(call, "tokens", 90)
    return run_linear(call, site, variants, lazy=lazy, in_place=in_place)


def weight_of(case: Case) -> Weight:
    bits = 8 if case.weight == "i8" else 4
    group = case.group or case.depth
    return Weight(case.columns, case.depth, group, bits, case.zero, byte_scales=case.bytes)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("case", "cut", "rows"), CASES, ids=lambda part: str(part))
def test_kernel_agrees_with_reference(case: Case, cut: Cut, rows: int, lazy: bool) -> None:
    call = linear_call(np.random.default_rng(5), case, rows=rows)
    assert_close(call, {"out": run(call, case, cut, lazy=lazy)})


@pytest.mark.parametrize("number", [2, 7])
def test_a_residual_that_the_result_replaces_is_added_once(number: int) -> None:
    case, cut, rows = CASES[number]
    call = linear_call(np.random.default_rng(7), case, rows=rows)
    assert_close(call, {"out": run(call, case, cut, lazy=False, in_place=True)})


@pytest.mark.parametrize("number", [4, 6, 10])
def test_a_row_does_not_depend_on_the_others(number: int) -> None:
    case, cut, rows = CASES[number]
    call = linear_call(np.random.default_rng(6), case, rows=rows)
    whole = run(call, case, cut, lazy=False)
    for some in (slice(0, 1), slice(rows // 2, rows)):
        assert run(take_rows(call, some), case, cut, lazy=True).tobytes() == whole[some].tobytes()


SIZES = [(4096, 14336, 4), (6144, 4096, 4), (28672, 4096, 4), (128256, 4096, 8)]


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("columns", "depth", "bits"), [*SIZES, (16, 128, 4), (10000, 256, 8)])
def test_cuts_fit_and_ascend(columns: int, depth: int, bits: int, group: int) -> None:
    weight = Weight(columns, depth, group, bits, has_zero=bits == 4)
    found = cuts(weight)
    assert [cut.max_rows for cut in found] == sorted({cut.max_rows for cut in found})
    assert found[-1].max_rows == 256
    for cut in found:
        assert cut.shared_bytes(weight) <= SM_90.shared_bytes
        assert cut.teams <= cut.stages(weight)
        assert cut.num_threads <= 1024


@pytest.mark.parametrize(("columns", "depth", "bits"), SIZES)
def test_cuts_compile(columns: int, depth: int, bits: int) -> None:
    pytest.importorskip("triton")
    group = 128 if bits == 8 else 32
    weight = Weight(columns, depth, group, bits, has_zero=bits == 4)
    out = "f32" if bits == 8 else "bf16"
    types = {"x": "bf16", "weight": "i8" if bits == 8 else "u4", "weight_scale": "f32"}
    beside = {"residual": out, "bias": "f32"} | ({"weight_zero": "u8"} if bits == 4 else {})
    site = Site(
        dtypes={**types, **beside, "out": out},
        strides={"x": depth, "out": columns, "residual": columns},
        axes={"N": columns, "K": depth},
        attributes={"weight_dtype": types["weight"], "softcap": 0.0},
        rows="tokens",
        page_size=PAGE_SIZE,
        limits=LIMITS,
        sm=90,
    )
    for variant in cut_variants(site, weight, cuts(weight)):
        (kernel,) = compiled(variant, 90)
        for instruction in (b"wgmma.mma_async", b"mbarrier.try_wait", b"griddepcontrol.wait"):
            assert instruction in kernel.ptx
