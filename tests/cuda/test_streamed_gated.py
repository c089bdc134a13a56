"""Gate, up and the activation over them by streamed.cu, on the CPU thread by thread."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.gated_calls import gated_call
from tests.support.kernels import KernelCall, assert_close
from tests.support.streamed_launch import compile_streamed, run_streamed
from tests.support.triton_kernels import needs_triton
from trtc.plugins.activations import activate
from trtc.plugins.gemm.streamed import Cut
from trtc.plugins.gemm.streamed_gated import gated_launch, gated_launches
from trtc.plugins.gpu.lowering import Site
from trtc.plugins.products import scaled_product
from trtc.plugins.rounding import NUMPY_DTYPES

needs_triton()

from tests.support.lowered import site_of  # noqa: E402

Array = NDArray[Any]

WIDTH = 80
"""Of out: part of a tile, and of a group's columns."""


def make_site(call: KernelCall, sm: int = 90) -> Site:
    """With scales of rows the kernel gives bf16, which quantize takes from there."""
    site = site_of(call, "tokens", sm)
    strides = {**site.strides, "x": site.axes["K"] + 16, "out": site.axes["I"] + 16}
    dtypes = {**site.dtypes, "out": "bf16"} if site.has("row_scale") else site.dtypes
    return replace(site, strides=strides, dtypes=dtypes)


def run(call: KernelCall, cut: Cut, *, lazy: bool = False) -> Array:
    site = make_site(call)
    return run_streamed(
        gated_launch(site, cut),
        cut,
        call.inputs,
        site.axes["I"],
        out=NUMPY_DTYPES[site.dtypes["out"]],
        strides=site.strides,
        lazy=lazy,
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("dtype", "cut"),
    [
        ("f8e4m3", Cut(16, 2, stages=3, x_stages=4)),
        ("f8e4m3", Cut(64, 1, stages=4, x_stages=3, teams=2, splits=2)),
        ("f8e4m3", Cut(192, 2, stages=2, x_stages=2, run=0)),
        ("f8e4m3", Cut(256, 2, stages=2, x_stages=2, run=0)),
        ("bf16", Cut(32, 1, stages=4, x_stages=4, teams=2, run=0)),
        ("bf16", Cut(128, 2, stages=2, x_stages=2, run=0)),
    ],
    ids=str,
)
def test_the_kernel_agrees_with_the_reference(dtype: str, cut: Cut, activation: str) -> None:
    """Ragged columns and depths; copies at once, and as late as may be."""
    counts = (cut.rows // 2 + 1,) if activation == "gelu_tanh" else (1, cut.rows - 7, cut.rows)
    for count in counts:
        call = gated_call(count, WIDTH, 528, dtype=dtype, activation=activation)
        assert_close(call, {"out": run(call, cut, lazy=count == cut.rows - 7)})


@pytest.mark.parametrize(
    "cut",
    [
        Cut(32, 2, stages=3, x_stages=4),
        Cut(64, 1, stages=4, x_stages=3, teams=2, splits=2),
        Cut(192, 2, stages=2, x_stages=2, run=0),
    ],
    ids=str,
)
def test_rows_with_scales_give_bf16(cut: Cut) -> None:
    """The reference's products and activation, without their quantisation."""
    for count in (3, cut.rows):
        call = gated_call(count, WIDTH, 528, by_row=True)
        inputs = {name: one for name, one in call.inputs.items() if one is not None}
        products = scaled_product(
            inputs["x"], inputs["weight"], inputs["weight_scale"], None, 0, "exact"
        )
        products *= inputs["row_scale"]
        expected = activate(products[:, :WIDTH], "silu") * products[:, WIDTH:]
        found = run(call, cut, lazy=count == 3).astype(np.float32)
        np.testing.assert_allclose(found, expected, rtol=1 / 128, atol=1e-5)


def test_more_tiles_than_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a group has of a tile waits where what it had of the last one did."""
    monkeypatch.setattr(Cut, "clusters", lambda cut, columns: 1)
    call = gated_call(17, WIDTH, 528)
    assert_close(call, {"out": run(call, Cut(32, 1, stages=3, x_stages=3), lazy=True)})


@pytest.mark.parametrize(
    ("dtype", "cut"),
    [
        ("f8e4m3", Cut(64, 1, stages=3, x_stages=3, teams=2, splits=2)),
        ("bf16", Cut(32, 2, stages=2, x_stages=2, run=0)),
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_the_others(dtype: str, cut: Cut) -> None:
    call = gated_call(cut.rows, WIDTH, 528, dtype=dtype)
    whole = run(call, cut)
    x = call.inputs["x"]
    assert x is not None
    for row in (0, cut.rows // 2 + 1, cut.rows - 1):
        one = {**call.inputs, "x": np.ascontiguousarray(x[row : row + 1])}
        alone = run(replace(call, inputs=one), cut)
        assert alone.tobytes() == np.ascontiguousarray(whole[row : row + 1]).tobytes()


def sized(
    dtype: str, activation: str, width: int = 14336, depth: int = 4096, *, by_row: bool = False
) -> Site:
    """A site of other sizes than arrays of the test could have."""
    call = gated_call(3, WIDTH, 528, dtype=dtype, activation=activation, by_row=by_row)
    site = make_site(call)
    strides = {"x": depth, "out": width}
    return replace(
        site,
        axes={**site.axes, "I": width, "N": 2 * width, "K": depth},
        strides={**site.strides, **strides},
    )


@pytest.mark.parametrize(
    ("dtype", "by_row", "scales", "activation"),
    [
        ("f8e4m3", False, 3, "silu"),
        ("f8e4m3", True, 2, "silu"),
        ("f8e4m3", True, 2, "gelu_tanh"),
        ("bf16", False, 0, "silu"),
        ("bf16", False, 0, "gelu_tanh"),
    ],
)
def test_every_cut_compiles(dtype: str, by_row: bool, scales: int, activation: str) -> None:
    """Without local memory, which compile_cuda refuses."""
    launches = gated_launches(sized(dtype, activation, by_row=by_row))
    assert launches
    for launched in launches.values():
        kernel = compile_streamed(launched)
        assert len(kernel.parameters) == scales + len(("dims", "out", "x", "weight"))


@pytest.mark.parametrize(
    "site",
    [
        replace(sized("f8e4m3", "silu"), sm=89),
        replace(sized("bf16", "silu"), sm=100),
        sized("f8e4m3", "silu", width=14336 + 8),
        sized("f8e4m3", "silu", depth=4096 + 8),
    ],
    ids=["another SM", "a later SM", "columns", "bytes of a row"],
)
def test_sites_that_are_left_to_other_kernels(site: Site) -> None:
    assert not gated_launches(site)
