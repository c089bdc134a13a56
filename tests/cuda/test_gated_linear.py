"""What gated_linear is lowered to: its kernel on the CPU, thread by thread, and its variants."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.cuda_on_cpu import launch as launch_on_cpu
from tests.support.cuda_on_cpu import poisoned
from tests.support.gated_calls import gated_call
from tests.support.kernels import KernelCall, assert_close
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gpu.lowering import Gemm, Launch, Lower, Site, Variant
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.rounding import NUMPY_DTYPES, quantize_rows
from trtc.protos.manifest import Limits

needs_triton()

from tests.support.lowered import site_of  # noqa: E402
from trtc.builder.targets.gpu.lowerings import lowerings  # noqa: E402
from trtc.builder.targets.gpu.nvrtc import compile_cuda  # noqa: E402

Array = NDArray[Any]

WIDTH, DEPTH = 256, 384
LOWER: Lower = lowerings()["gated_linear"]


def make_call(
    rows: int, activation: str = "silu", width: int = WIDTH, *, by_row: bool = False
) -> KernelCall:
    return gated_call(rows, width, DEPTH, activation=activation, by_row=by_row)


def make_site(
    sm: int = 90, width: int = WIDTH, most_rows: int = 4096, *, by_row: bool = False
) -> Site:
    site = site_of(make_call(3, width=width, by_row=by_row), "tokens", sm)
    return replace(site, limits=Limits(64, 1024, most_rows))


def source_of(call: KernelCall, programs: int) -> CudaSource:
    """The kernel with so many programs: idle ones take their time here."""
    (*_, many) = LOWER(replace(site_of(call, "tokens", 90), limits=Limits(64, 1024, 4096)))
    (kernel,) = (
        one.kernel
        for one in many.work
        if isinstance(one, Launch) and isinstance(one.kernel, CudaSource)
    )
    return replace(kernel, constants={**kernel.constants, "PROGRAMS": programs, "GROUP": 1})


def run(call: KernelCall, *, programs: int = 2, lazy: bool = False) -> Array:
    """Of a poisoned out with more rows and columns, which must stay."""
    source = source_of(call, programs)
    x = call.inputs["x"]
    assert x is not None
    rows, stale = len(x), 5
    stale_x = poisoned((rows + stale, DEPTH), x.dtype)
    stale_x[:rows] = x
    width, stride = int(source.constants["I"]), int(source.constants["OUT_STRIDE"])
    out_dtype = {one.name: one.dtype for one in source.parameters}["out"]
    out = poisoned((rows + stale, stride), NUMPY_DTYPES[out_dtype])
    maps = np.zeros(programs * 2 * 128 + 128, np.uint8)
    begin = -maps.ctypes.data % 128
    arrays = {
        **call.inputs,
        "x": stale_x,
        "dims": np.array([rows, 0, 0, 0], np.int32),
        "out": out,
        "maps": maps[begin:],
    }
    arguments = [arrays[parameter.name] for parameter in source.parameters]
    launch_on_cpu(
        source,
        [array for array in arguments if array is not None],
        (programs, 1, 1),
        lazy=lazy,
        late=[stale_x],
    )
    untouched = poisoned(out.shape, out.dtype)
    untouched[:rows, :width] = out[:rows, :width]
    assert out.tobytes() == untouched.tobytes(), "written beside the result"
    return out[:rows, :width]


@pytest.mark.parametrize(
    ("rows", "activation", "programs", "lazy"),
    [(300, "silu", 2, True), (300, "silu", 4, False), (129, "gelu_tanh", 2, False)],
)
def test_the_kernel_agrees_with_the_reference(
    rows: int, activation: str, programs: int, lazy: bool
) -> None:
    """Four tiles, or two, by one cluster or two; the second block has few rows, or one."""
    call = make_call(rows, activation)
    assert_close(call, {"out": run(call, programs=programs, lazy=lazy)})


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_rows_with_scales_agree_with_the_reference(activation: str) -> None:
    call = make_call(300, activation, by_row=True)
    codes, scales = quantize_rows(run(call, lazy=True), 1, "f8e4m3")
    assert_close(call, {"out": codes, "out_row_scale": scales})


def test_a_row_does_not_depend_on_the_others() -> None:
    call = make_call(260)
    whole = run(call)
    x = call.inputs["x"]
    assert x is not None
    some = run(replace(call, inputs={**call.inputs, "x": np.ascontiguousarray(x[255:258])}))
    assert some.tobytes() == np.ascontiguousarray(whole[255:258]).tobytes()


def test_some_rows_are_multiplied_and_gated_in_two_steps() -> None:
    """More than a decode step has, and fewer than gated_sm90.cu is for."""
    *_, some, many = LOWER(make_site())
    assert some.max_rows == 512
    product, gate = some.work
    assert written(product) == "scratch.product"
    assert isinstance(gate, Launch)
    assert {"scratch.product", "scratch.up", "out"} <= set(gate.arguments)
    assert some.scratch == {"product": some.max_rows * 2 * WIDTH * 2}
    assert some.views == {"up": ("product", WIDTH * 2)}
    assert entry(many) == "gated_linear" and many.max_rows == 4096


def test_few_rows_are_gated_by_the_activation_for_few() -> None:
    """Where skinny.cu does not gate them: its tiles have eight columns of out."""
    first, second, *_ = LOWER(make_site(width=4100))
    gates = first.work[-1], second.work[-1]
    programs = [gate.grid[0].times for gate in gates if isinstance(gate, Launch)]
    assert programs == [-(-4100 // 512), -(-4100 // 2048)]


def kernels(site: Site) -> list[tuple[int, list[str]]]:
    """What each variant runs, by the rows that it is for."""
    return [(variant.max_rows, [name_of(one) for one in variant.work]) for variant in LOWER(site)]


def test_some_rows_of_wide_products_are_gated_where_they_are_multiplied() -> None:
    """By streamed.cu, in place of two steps for as many; the fewest by skinny.cu."""
    few, streamed = ["skinny_linear"], ["streamed_linear"]
    at_once = [(rows, streamed) for rows in (16, 32, 64, 128, 192, 256)]
    library = ["product", "swiglu"]
    wide = make_site(width=8192)
    assert kernels(wide) == [(8, few), *at_once, (512, library), (4096, ["gated_linear"])]
    for most in (300, 40):
        shorter = replace(wide, limits=Limits(64, 1024, most))
        fit = [one for one in at_once if one[0] <= most]
        last = library if most == 300 else streamed
        assert kernels(shorter) == [(8, few), *fit, (most, last)]


@pytest.mark.parametrize(
    ("width", "skinny", "most"), [(WIDTH, (8, 16), (32, 64, 128)), (2816, (8,), (16, 32, 64, 128))]
)
def test_so_are_those_of_narrower_ones(
    width: int, skinny: tuple[int, ...], most: tuple[int, ...]
) -> None:
    """As shared experts are; of few tiles several blocks take a part each."""
    site = make_site(width=width)
    found = kernels(replace(site, axes={**site.axes, "K": 2048}))
    at_once = [(rows, ["skinny_linear"]) for rows in skinny]
    at_once += [(rows, ["streamed_linear"]) for rows in most]
    assert found == [*at_once, (512, ["product", "swiglu"]), (4096, ["gated_linear"])]


def test_rows_with_scales_are_quantised_after_one_launch_or_by_the_activation() -> None:
    few, library = ["skinny_linear", "swiglu"], ["product", "swiglu"]
    at_once = [(n, ["streamed_linear", "quantize_rows"]) for n in (16, 32, 64, 128, 192, 256)]
    site = make_site(width=8192, by_row=True)
    many = (4096, ["gated_linear", "quantize_rows"])
    assert kernels(site) == [(8, few), *at_once, (512, library), many]
    variants = LOWER(site)
    for variant in variants:
        assert {"out", "out_row_scale"} <= set(variant.work[-1].arguments)  # type: ignore[union-attr]
    assert variants[1].scratch == {"gated": 16 * 8192 * 2}
    before = kernels(replace(site, sm=89))
    assert [work for _, work in before] == [few, few, ["tile_product", "swiglu"]]


def test_bf16_is_gated_in_the_same_kernel_or_in_two_steps() -> None:
    site = site_of(gated_call(3, 8192, 256, dtype="bf16"), "tokens", 90)
    site = replace(site, limits=Limits(64, 1024, 4096))
    few, library = ["skinny_linear"], ["product", "swiglu"]
    at_once = [(rows, ["streamed_linear"]) for rows in (16, 32, 64, 128, 192, 256)]
    assert kernels(site) == [(8, few), *at_once, (4096, library)]
    before = kernels(replace(site, sm=89))
    assert [work for _, work in before] == [few, [*few, "swiglu"], library]


def name_of(work: object) -> str:
    if isinstance(work, Gemm):
        return "product"
    assert isinstance(work, Launch)
    kernel = work.kernel
    return kernel.entry if isinstance(kernel, CudaSource) else kernel.function.__name__


def written(work: object) -> str:
    if isinstance(work, Gemm):
        return work.out
    assert isinstance(work, Launch)
    return work.arguments[-1]


def entry(variant: Variant) -> str:
    (launched,) = variant.work
    assert isinstance(launched, Launch) and isinstance(launched.kernel, CudaSource)
    return launched.kernel.entry


@pytest.mark.parametrize(
    "site",
    [make_site(sm=89), make_site(sm=100), make_site(width=WIDTH + 64), make_site(most_rows=512)],
    ids=["another SM", "a later SM", "part of a tile", "few tokens at most"],
)
def test_two_steps_for_all_but_few_rows(site: Site) -> None:
    *few, many = LOWER(site)
    assert (few[0].max_rows, entry(few[0])) == (8, "skinny_linear")
    assert len(many.work) == 2 and many.max_rows == site.limits.max_num_tokens


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_kernel_compiles(activation: str) -> None:
    kernel = source_of(make_call(1, activation), programs=132)
    constants = {**kernel.constants, "K": 4096, "I": 14336, "X_STRIDE": 4096, "OUT_STRIDE": 14336}
    compiled = compile_cuda(replace(kernel, constants=constants), 90)
    for instruction in (b"wgmma", b"tensormap.cp_fenceproxy", b"multicast", b"griddepcontrol.wait"):
        assert instruction in compiled.ptx
