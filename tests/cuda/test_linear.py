"""What linear is lowered to, run on the CPU against the operator's reference.

The Triton kernels run in Triton's interpreter, skinny.cu thread by thread (tests/support/
cuda_on_cpu).
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.compiled import compile_sources, one_of_each
from tests.support.cuda_on_cpu import launch as launch_on_cpu
from tests.support.cuda_on_cpu import poisoned
from tests.support.kernels import KernelCall, assert_close
from tests.support.linear_calls import Case, linear_call, take_rows
from tests.support.triton_kernels import Work, needs_triton
from trtc.plugins.gpu.lowering import Collective, Gemm, Launch, Site
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.errors import UnsupportedError
from trtc.protos.manifest import Limits

needs_triton()

from tests.support.lowered import run_lowered, site_of  # noqa: E402
from trtc.builder.targets.gpu.nvrtc import compile_cuda  # noqa: E402
from trtc.plugins.gemm import cuda, skinny  # noqa: E402
from trtc.plugins.gpu.arch import ARCHS  # noqa: E402

TILES = [
    Case("f32", "f32", 80, 131, bias=True, residual=True, out="f32", layout="row_major"),
    Case("f32", "f32", 17, 300, softcap=3.0, out="f32", layout="row_major"),
    Case("bf16", "bf16", 33, 31, layout="row_major"),
    Case("bf16", "bf16", 100, 65, bias=True, residual=True, layout="row_major"),
    Case("bf16", "bf16", 17, 64, softcap=2.0, out="f32", layout="row_major"),
    Case("bf16", "f8e4m3", 17, 70, input_scale=True, layout="row_major"),
    Case("f8e4m3", "f8e4m3", 100, 161, input_scale=True, bias=True, layout="row_major"),
    Case("f8e4m3", "f8e4m3", 16, 5, input_scale=True, out="f32", layout="row_major"),
    Case("f32", "f8e4m3", 17, 33, out="f32", layout="row_major"),
    Case("f8e4m3", "f8e4m3", 70, 96, scales=1, residual=True, layout="row_major"),
]
SKINNY = [
    Case("bf16", "bf16", 200, 520, bias=True, residual=True, layout="row_major"),
    Case("bf16", "bf16", 330, 64, softcap=2.0, out="f32", layout="row_major"),
    Case("f8e4m3", "f8e4m3", 330, 1040, input_scale=True, layout="row_major"),
    Case("f8e4m3", "f8e4m3", 150, 16, input_scale=True, bias=True, out="f32", layout="row_major"),
    Case("f8e4m3", "f8e4m3", 330, 1040, scales=1, residual=True, layout="row_major"),
]
LONG = Case("bf16", "bf16", 150, 4096, layout="row_major")


def dense_call(case: Case, rows: int = 9) -> KernelCall:
    """x is contiguous: the plan's views begin at multiples of 16 bytes."""
    call = linear_call(np.random.default_rng(7), case, rows)
    x = call.inputs["x"]
    assert x is not None
    return replace(call, inputs={**call.inputs, "x": np.ascontiguousarray(x)})


def site(case: Case, sm: int, most_rows: int = 4096) -> Site:
    found = site_of(dense_call(case), "tokens", sm)
    return replace(found, limits=Limits(64, 1024, most_rows))


@pytest.mark.parametrize("case", TILES, ids=str)
def test_the_tile_kernel_agrees_with_the_reference(case: Case) -> None:
    call = dense_call(case)
    assert_close(call, run_lowered(call, run=tile_work))


@pytest.mark.parametrize("case", TILES, ids=str)
def test_a_row_of_the_tile_kernel_does_not_depend_on_the_others(case: Case) -> None:
    call = dense_call(case, rows=37)
    whole = run_lowered(call, run=tile_work)["out"]
    for rows in (slice(0, 1), slice(31, 34)):
        some = run_lowered(take_rows(call, rows), run=tile_work)["out"]
        assert some.tobytes() == np.ascontiguousarray(whole[rows]).tobytes()


def tile_work(work: Work) -> Any:
    """`run_lowered` with the tile kernel, whatever the site is lowered to."""
    from tests.support.triton_kernels import interpret_work

    return interpret_work(replace(work, lower="tests.support.linear_calls:tile_variants"))


def test_the_softcap_of_logits_follows_the_product() -> None:
    """cuBLASLt's product, which the kernel then caps in place, is the reference's without a cap."""
    case = Case("bf16", "bf16", 1500, 24, softcap=2.0, out="f32", layout="row_major")
    call = dense_call(case, rows=5)
    (product, capped) = cuda.lower_gemm(site(case, 80))[-1].work
    assert isinstance(product, Gemm) and isinstance(capped, Launch)
    plain = replace(call, attributes={**call.attributes, "softcap": 0.0})
    logits = plain.reference()["out"]

    def cap(work: Work) -> Any:
        from tests.support.triton_kernels import interpret_work

        out = work.arrays["out"].copy()
        out[: len(logits), : logits.shape[1]] = logits
        lowered = replace(work, lower="tests.support.linear_calls:cap_variants")
        return interpret_work(replace(lowered, arrays={**work.arrays, "out": out}))

    assert_close(call, run_lowered(call, run=cap))


@pytest.mark.parametrize(
    ("case", "sm", "rows", "blocks"),
    [
        (SKINNY[0], 80, 8, 1),
        (SKINNY[0], 90, 32, 2),
        (SKINNY[1], 90, 64, 2),
        (SKINNY[2], 89, 16, 1),
        (SKINNY[2], 90, 8, 2),
        (SKINNY[3], 90, 128, 2),
        (SKINNY[3], 90, 16, 1),
        (SKINNY[4], 90, 16, 2),
        (SKINNY[4], 90, 64, 2),
        (LONG, 90, 8, 8),
    ],
    ids=str,
)
def test_the_skinny_kernel_agrees_with_the_reference(
    case: Case, sm: int, rows: int, blocks: int
) -> None:
    """mma.sync, and WGMMA on sm_90; clusters of one block, of two, and of eight (long rows); copies
    at once, and as late as may be."""
    source = two_clusters(site(case, sm), rows)
    assert source.constants["CLUSTER"] == blocks
    for count in {1, rows // 2 + 1, rows}:
        call = dense_call(case, count)
        for lazy in (False, True):
            assert_close(call, {"out": run_skinny(source, call, lazy=lazy)})


@pytest.mark.parametrize(("case", "rows"), [(SKINNY[1], 64), (SKINNY[2], 8)], ids=str)
def test_a_row_of_the_skinny_kernel_does_not_depend_on_the_others(case: Case, rows: int) -> None:
    source = two_clusters(site(case, 90), rows)
    call = dense_call(case, rows)
    whole = run_skinny(source, call)
    for row in (0, rows // 2 + 1, rows - 1):
        alone = run_skinny(source, take_rows(call, slice(row, row + 1)))
        assert alone.tobytes() == np.ascontiguousarray(whole[row : row + 1]).tobytes()


def two_clusters(found: Site, rows: int) -> CudaSource:
    """The kernel for so many rows, with fewer clusters than there are tiles, and short rings."""
    launched = skinny.skinny_launches(found)[rows]
    assert isinstance(launched.kernel, CudaSource)
    constants = {**launched.kernel.constants, "CLUSTERS": 2, "STAGES": 2}
    return replace(launched.kernel, constants=constants)


def run_skinny(source: CudaSource, call: KernelCall, lazy: bool = False) -> Any:
    """`out`, from poisoned memory; rows after the real ones may be neither read nor written."""
    x = call.inputs["x"]
    assert x is not None
    count, columns = len(x), int(source.constants["N"])
    stale = poisoned((int(source.constants["ROWS"]), x.shape[1]), x.dtype)
    stale[:count] = x
    width = int(source.constants["OUT_STRIDE"])
    out = poisoned((count + 1, width), NUMPY_DTYPES[str(call.attributes["out_dtype"])])
    dims = np.array([count, 0, 0, 0], np.int32)
    arrays = {**call.inputs, "x": stale, "dims": dims, "out": out}
    residual = call.inputs.get("residual")
    if residual is not None:
        wide = poisoned((count, int(source.constants["RESIDUAL_STRIDE"])), residual.dtype)
        wide[:, :columns] = residual
        arrays["residual"] = wide
    arguments = [arrays[parameter.name] for parameter in source.parameters]
    grid = (2 * int(source.constants["CLUSTER"]), 1, 1)
    launch_on_cpu(source, [a for a in arguments if a is not None], grid, lazy=lazy, late=[stale])
    untouched = poisoned((count + 1, width), out.dtype)
    untouched[:count, :columns] = out[:count, :columns]
    assert out.tobytes() == untouched.tobytes(), "written beside the result"
    return out[:count, :columns]


@pytest.mark.parametrize("sm", ARCHS)
@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3"])
def test_the_skinny_kernel_compiles_for_every_sm(sm: int, dtype: str) -> None:
    for columns, depth, out in ((4096, 14336, "bf16"), (32000, 4096, "f32")):
        adds = out == "bf16"
        is_e4m3 = dtype == "f8e4m3"
        case = Case(
            dtype,
            dtype,
            columns,
            16,
            input_scale=is_e4m3 and not adds,
            scales=int(is_e4m3 and adds),
            residual=adds,
            out=out,
        )
        found = replace(
            site(replace(case, layout="row_major"), sm), axes={"N": columns, "K": depth}
        )
        strides = {"x": depth, "weight": depth, "out": columns, "residual": columns}
        strides["row_scale"] = 1
        found = replace(found, strides=strides)
        for launched in skinny.skinny_launches(found).values():
            assert isinstance(launched.kernel, CudaSource)
            if dtype == "f8e4m3" and not ARCHS[sm].has_e4m3:
                with pytest.raises(UnsupportedError, match="no E4M3"):
                    compile_cuda(launched.kernel, sm)
                continue
            kernel = compile_cuda(launched.kernel, sm)
            assert launched.grid[0].times % int(launched.kernel.constants["CLUSTER"]) == 0
            products = rb"wgmma" if sm == 90 else rb"mma.sync"
            assert products in kernel.ptx


@pytest.mark.parametrize(
    "sm", one_of_each(lambda arch: (arch.has_e4m3, arch.has_pdl, arch.has_wgmma))
)
def test_the_tile_kernels_compile(sm: int) -> None:
    tiles = [TILES[0], TILES[6] if ARCHS[sm].has_e4m3 else TILES[3]]
    case = Case("bf16", "bf16", 128, 16, softcap=30.0, out="f32", layout="row_major")
    capped = cuda.lower_gemm(site(case, sm))[-1].work[1]
    assert isinstance(capped, Launch) and not isinstance(capped.kernel, CudaSource)
    sources = [*(cuda.tiles_launch(site(one, sm)).kernel for one in tiles), capped.kernel]
    *products, cap = compile_sources(sources, sm)
    assert all(one.cubin.startswith(b"\x7fELF") for one in products)
    assert b".shared" not in cap.ptx


FP8 = Case("f8e4m3", "f8e4m3", 4096, 4096, input_scale=True, layout="row_major")
BF16 = Case("bf16", "bf16", 4096, 4096, layout="row_major")


FEW = ["skinny"] * 2 + ["streamed"] * 3
FEW_LONG = FEW[1:]
"""With rows of 8 KB 16 of x are left to the kernel for 32."""


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (FP8, [*FEW, "product"]),
        (BF16, [*FEW_LONG, "product"]),
        (replace(BF16, out="f32"), [*FEW_LONG, "product"]),
        (replace(BF16, bias=True), [*FEW_LONG, "product"]),
        (replace(BF16, softcap=3.0, out="f32"), [*FEW_LONG, "product cap"]),
        (replace(BF16, softcap=3.0), [*FEW_LONG, "tile_product"]),
        (replace(BF16, residual=True), [*FEW_LONG, "product"]),
        (replace(BF16, residual=True, softcap=3.0), [*FEW_LONG, "tile_product"]),
        (replace(FP8, out="f32"), [*FEW, "tile_product"]),
        (replace(FP8, columns=4090), ["skinny"] * 5 + ["tile_product"]),
        (replace(FP8, depth=520), ["tile_product"]),
        (replace(BF16, depth=523), ["product"]),
        (Case("f32", "f32", 64, 64, out="f32", layout="row_major"), ["product"]),
        (Case("bf16", "f8e4m3", 64, 64, layout="row_major"), ["tile_product"]),
    ],
    ids=str,
)
def test_variants_of_a_site(case: Case, kinds: list[str]) -> None:
    variants = cuda.lower_gemm(site(case, 90))
    assert [variant_kind(variant.work) for variant in variants] == kinds
    most = [variant.max_rows for variant in variants]
    assert most == sorted(set(most)) and most[-1] == 4096
    assert all(variant.kind == "any" for variant in variants)


def variant_kind(work: tuple[Launch | Gemm | Collective, ...]) -> str:
    names = []
    for one in work:
        assert not isinstance(one, Collective)
        if isinstance(one, Gemm):
            names.append("product")
        elif isinstance(one.kernel, CudaSource):
            names.append(one.kernel.entry.removesuffix("_linear"))
        else:
            names.append(str(one.kernel.function.fn.__name__))
    return " ".join(names)


def test_few_tokens_need_no_kernel_for_more() -> None:
    variants = cuda.lower_gemm(site(FP8, 90, most_rows=12))
    assert [variant.max_rows for variant in variants] == [8, 12, 12]
    assert [variant_kind(variant.work) for variant in variants] == ["skinny", "skinny", "product"]
    (launched,) = variants[1].work
    assert isinstance(launched, Launch) and launched.kernel.constants["ROWS"] == 16
