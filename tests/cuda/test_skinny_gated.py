"""Gate, up and the activation over them by skinny.cu, on the CPU thread by thread."""

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
from trtc.plugins.activations import activate
from trtc.plugins.gemm.skinny import gated_skinny_launches, skinny_launches
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch, Site
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.rounding import NUMPY_DTYPES, cast, quantize

needs_triton()

from tests.support.lowered import site_of  # noqa: E402
from trtc.builder.targets.gpu.nvrtc import compile_cuda  # noqa: E402

Array = NDArray[Any]

WIDTH, DEPTH = 104, 528
"""Columns of out, with part of a tile; part of a segment."""
ROWS = 8
BESIDE = 16
"""Columns beside those of x and out."""
by_type = pytest.mark.parametrize("dtype", ["f8e4m3", "bf16"])
by_activation = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])


def make_site(call: KernelCall, sm: int = 90) -> Site:
    site = site_of(call, "tokens", sm)
    strides = {**site.strides, "x": DEPTH, "out": WIDTH + BESIDE}
    return replace(site, strides=strides)


def product_site(site: Site) -> Site:
    """linear's, of both products in bf16."""
    columns = 2 * site.axes["I"]
    return replace(
        site,
        dtypes={**site.dtypes, "out": "bf16"},
        strides={**site.strides, "out": columns},
        attributes={"softcap": 0.0},
    )


def source_of(launched: Launch) -> CudaSource:
    """With fewer clusters than there are tiles, and short rings."""
    assert isinstance(launched.kernel, CudaSource)
    constants = {**launched.kernel.constants, "CLUSTERS": 2, "STAGES": 2}
    return replace(launched.kernel, constants=constants)


def run(source: CudaSource, call: KernelCall, columns: int, dtype: str, lazy: bool) -> Array:
    """Of a poisoned out with a row and columns more, which must stay."""
    x = call.inputs["x"]
    assert x is not None
    count, stride = len(x), int(source.constants["OUT_STRIDE"])
    stale = poisoned((ROWS, DEPTH), x.dtype)
    stale[:count] = x
    out = poisoned((count + 1, stride), NUMPY_DTYPES[dtype])
    dims = np.array([count, 0, 0, 0], np.int32)
    arrays = {**call.inputs, "x": stale, "dims": dims, "out": out}
    given = [arrays[parameter.name] for parameter in source.parameters]
    grid = (2 * int(source.constants["CLUSTER"]), 1, 1)
    launch_on_cpu(source, [a for a in given if a is not None], grid, lazy=lazy, late=[stale])
    untouched = poisoned(out.shape, out.dtype)
    untouched[:count, :columns] = out[:count, :columns]
    assert out.tobytes() == untouched.tobytes(), "written beside the result"
    return np.ascontiguousarray(out[:count, :columns])


def run_gated(call: KernelCall, *, sm: int = 90, lazy: bool = False) -> Array:
    source = source_of(gated_skinny_launches(make_site(call, sm))[ROWS])
    return run(source, call, WIDTH, str(call.attributes["weight_dtype"]), lazy)


@by_activation
@by_type
@pytest.mark.parametrize("sm", [80, 90])
def test_the_kernel_agrees_with_the_reference(sm: int, dtype: str, activation: str) -> None:
    """mma.sync, and WGMMA; copies at once, and as late as may be."""
    if dtype == "f8e4m3" and not ARCHS[sm].has_e4m3:
        sm = 89
    for count in (1, 5, ROWS):
        call = gated_call(count, WIDTH, DEPTH, dtype=dtype, activation=activation)
        assert_close(call, {"out": run_gated(call, sm=sm, lazy=count == 5)})


@by_activation
@by_type
def test_it_rounds_what_two_launches_round(dtype: str, activation: str) -> None:
    """Exponentials are other here than NumPy's, which hardly shows in bf16."""
    call = gated_call(ROWS, WIDTH, DEPTH, dtype=dtype, activation=activation)
    source = source_of(skinny_launches(product_site(make_site(call)))[ROWS])
    products = run(source, call, 2 * WIDTH, "bf16", False).astype(np.float32)
    unit = cast(activate(products[:, :WIDTH], activation), "bf16").astype(np.float32)
    out_scale = call.inputs.get("out_scale")
    two = quantize(unit * products[:, WIDTH:], None, out_scale, dtype, through="bf16")
    assert np.mean(run_gated(call).view(np.uint8) != two.view(np.uint8)) < 0.005


@by_type
def test_a_row_does_not_depend_on_the_others(dtype: str) -> None:
    call = gated_call(ROWS, WIDTH, DEPTH, dtype=dtype)
    whole, x = run_gated(call), call.inputs["x"]
    assert x is not None
    for row in (0, ROWS - 1):
        one = {**call.inputs, "x": np.ascontiguousarray(x[row : row + 1])}
        alone = run_gated(replace(call, inputs=one))
        assert alone.tobytes() == whole[row : row + 1].tobytes()


@by_activation
@pytest.mark.parametrize(
    ("sm", "dtype"),
    [
        *((sm, "bf16") for sm in ARCHS),
        *((sm, "f8e4m3") for sm, arch in ARCHS.items() if arch.has_e4m3),
    ],
)
def test_it_compiles_for_every_sm(sm: int, dtype: str, activation: str) -> None:
    site = make_site(gated_call(1, WIDTH, DEPTH, dtype=dtype, activation=activation), sm)
    axes = {**site.axes, "I": 14336, "N": 2 * 14336, "K": 4096}
    site = replace(site, axes=axes, strides={**site.strides, "x": 4096, "out": 14336})
    (launched,) = gated_skinny_launches(site).values()
    assert isinstance(launched.kernel, CudaSource)
    ptx = compile_cuda(launched.kernel, sm).ptx
    assert b"div.full.f32" in ptx and b"ex2.approx" in ptx


def test_sites_that_are_left_to_two_steps() -> None:
    assert not gated_skinny_launches(make_site(gated_call(1, WIDTH, DEPTH, by_row=True)))
    assert not gated_skinny_launches(make_site(gated_call(1, WIDTH + 4, DEPTH)))
