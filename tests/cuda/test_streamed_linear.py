"""The kernel for 16 to 256 rows on sm_90 (streamed.cu), on the CPU thread by thread."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.kernels import KernelCall, assert_close
from tests.support.linear_calls import Case, linear_call, take_rows
from tests.support.streamed_launch import compile_streamed, run_streamed, stale_rows
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gemm.streamed import Cut, streamed_launch, streamed_launches
from trtc.plugins.gpu.lowering import Launch, Site
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.manifest import Limits

needs_triton()

from tests.support.lowered import site_of  # noqa: E402
from trtc.plugins.gemm import cuda  # noqa: E402

Array = NDArray[Any]

PLAIN = Case("f8e4m3", "f8e4m3", 144, 656, input_scale=True, layout="row_major")
ALL = Case(
    "f8e4m3", "f8e4m3", 208, 528, input_scale=True, bias=True, residual=True, layout="row_major"
)
WIDE = Case("f8e4m3", "f8e4m3", 336, 272, input_scale=True, out="f32", layout="row_major")
BF16 = Case("bf16", "bf16", 208, 264, bias=True, residual=True, out="f32", layout="row_major")
BY_ROW = Case("f8e4m3", "f8e4m3", 208, 528, scales=1, residual=True, layout="row_major")
CAPPED = Case("bf16", "bf16", 176, 264, softcap=2.0, layout="row_major")


def dense_call(case: Case, rows: int) -> KernelCall:
    """x is contiguous: the plan's views begin at multiples of 16 bytes."""
    call = linear_call(np.random.default_rng(9), case, rows)
    x = call.inputs["x"]
    assert x is not None
    return replace(call, inputs={**call.inputs, "x": np.ascontiguousarray(x)})


def make_site(case: Case, sm: int = 90, most_rows: int = 4096) -> Site:
    site = site_of(dense_call(case, 3), "tokens", sm)
    strides = {**site.strides, "x": case.depth + 16}
    # Pairs of columns are read and written at once: rows begin at multiples of 16 bytes.
    strides |= {name: case.columns + 16 for name in ("out", "residual") if name in strides}
    return replace(site, strides=strides, limits=Limits(64, 1024, most_rows))


def run(case: Case, cut: Cut, call: KernelCall, *, lazy: bool = False) -> Array:
    site = make_site(case)
    inputs, residual = dict(call.inputs), call.inputs.get("residual")
    if residual is not None:
        inputs["residual"] = stale_rows(residual, len(residual), site.strides["residual"])
    return run_streamed(
        streamed_launch(site, cut),
        cut,
        inputs,
        case.columns,
        out=NUMPY_DTYPES[case.out],
        strides=site.strides,
        lazy=lazy,
    )


@pytest.mark.parametrize(
    ("case", "cut"),
    [
        (PLAIN, Cut(16, 1, stages=2, x_stages=3, run=1)),
        (PLAIN, Cut(64, 1, stages=4, x_stages=3, teams=2, run=2)),
        (ALL, Cut(64, 1, stages=3, x_stages=3, teams=2, splits=2, run=0)),
        (ALL, Cut(32, 2, stages=2, x_stages=2, splits=2, run=4)),
        (PLAIN, Cut(64, 1, stages=2, x_stages=2, splits=4)),
        (WIDE, Cut(128, 2, stages=2, x_stages=2, run=0)),
        (BF16, Cut(64, 2, stages=2, x_stages=2, run=1)),
        (CAPPED, Cut(256, 1, stages=4, x_stages=2, splits=2, run=0)),
        (BY_ROW, Cut(128, 2, stages=2, x_stages=2, run=0)),
        (BY_ROW, Cut(32, 1, stages=3, x_stages=3, teams=2, splits=2)),
        (BY_ROW, Cut(256, 1, stages=3, x_stages=3, splits=2, run=0)),
    ],
    ids=str,
)
def test_the_kernel_agrees_with_the_reference(case: Case, cut: Cut) -> None:
    """Ragged columns and depths; copies at once, and as late as may be."""
    for count, lazy in ((1, False), (cut.rows // 2 + 1, True), (cut.rows, False)):
        call = dense_call(case, count)
        assert_close(call, {"out": run(case, cut, call, lazy=lazy)})


@pytest.mark.parametrize(
    ("case", "cut"),
    [
        (PLAIN, Cut(64, 1, stages=3, x_stages=3, teams=2, splits=2)),
        (BF16, Cut(128, 2, stages=2, x_stages=2, run=0)),
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_the_others(case: Case, cut: Cut) -> None:
    call = dense_call(case, cut.rows)
    whole = run(case, cut, call)
    for row in (0, cut.rows // 2 + 1, cut.rows - 1):
        alone = run(case, cut, take_rows(call, slice(row, row + 1)))
        assert alone.tobytes() == np.ascontiguousarray(whole[row : row + 1]).tobytes()


def sized(case: Case, columns: int, depth: int) -> Site:
    """The site with other sizes than arrays of the test could have."""
    strides = {"x": depth, "weight": depth, "out": columns, "residual": columns}
    site = make_site(case)
    known = {name: strides.get(name, 1) for name in site.strides}
    return replace(site, axes={"N": columns, "K": depth}, strides=known)


@pytest.mark.parametrize(
    ("case", "columns", "depth"),
    [
        *((case, n, 4096) for case in (ALL, BF16) for n in (4096, 6144, 28672, 128256)),
        *((CAPPED, n, 4096) for n in (4096, 128256)),
        (BY_ROW, 4096, 14336),
        (BF16, 272, 2048),
    ],
    ids=str,
)
def test_every_cut_compiles(case: Case, columns: int, depth: int) -> None:
    """Without local memory, which compile_cuda refuses. Cuts are by type and shape; a cap comes
    after any of them."""
    launches = streamed_launches(sized(case, columns, depth))
    assert launches
    for launched in launches.values():
        kernel = compile_streamed(launched)
        assert len(kernel.parameters) == len(launched.arguments) + len(launched.maps)


@pytest.mark.parametrize(
    "site",
    [
        make_site(PLAIN, sm=89),
        make_site(PLAIN, sm=100),
        make_site(replace(PLAIN, columns=136)),
        make_site(replace(PLAIN, depth=648)),
        make_site(replace(PLAIN, depth=384)),
        make_site(Case("bf16", "f8e4m3", 64, 640, layout="row_major")),
    ],
    ids=["another SM", "a later SM", "columns", "bytes of a row", "short rows", "two types"],
)
def test_sites_that_are_left_to_other_kernels(site: Site) -> None:
    assert not [rows for rows in streamed_launches(site) if rows < 128]


def test_variants_of_both_kernels_ascend_to_what_a_step_can_have() -> None:
    """Of both kernels for as many rows, this one; of a step that is shorter, the smallest."""

    def most(site: Site) -> list[tuple[int, str]]:
        works = [(variant.max_rows, variant.work[0]) for variant in cuda.lower_gemm(site)[:-1]]
        return [
            (rows, work.kernel.entry)
            for rows, work in works
            if isinstance(work, Launch) and isinstance(work.kernel, CudaSource)
        ]

    skinny, streamed = "skinny_linear", "streamed_linear"
    few = [(8, skinny), (16, skinny), (32, streamed), (64, streamed), (128, streamed)]
    found = sized(PLAIN, 4096, 4096)
    assert most(found) == few
    assert most(replace(found, limits=Limits(64, 1024, 40))) == [*few[:3], (40, streamed)]
    assert most(replace(found, limits=Limits(64, 1024, 12))) == [(8, skinny), (12, skinny)]
    assert most(sized(PLAIN, 4096, 14336)) == [few[0], *few[2:]]
    assert most(sized(BY_ROW, 4096, 4096)) == few
    deep = [few[0], *few[2:], (192, streamed), (256, streamed)]
    assert most(sized(BY_ROW, 4096, 14336)) == deep
    wide = [(8, skinny), *((rows, streamed) for rows in (16, 32, 64, 128, 256))]
    assert most(sized(PLAIN, 28672, 4096)) == wide


def test_rows_that_x_has_no_room_for_are_not_copied() -> None:
    """Logit rows are as many as there may be sequences."""
    cut = Cut(64, 1, stages=3, x_stages=3)
    logits = replace(make_site(PLAIN), rows="rows", limits=Limits(40, 1024, 4096))
    tokens = replace(logits, rows="tokens", limits=Limits(40, 1024, 48))
    for site, rows in ((logits, 40), (tokens, 48), (make_site(PLAIN), 64)):
        x, _ = streamed_launch(site, cut).maps
        assert x.sizes == (656, rows) and x.box == (128, 64)
