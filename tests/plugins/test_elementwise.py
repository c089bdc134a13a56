"""Row-wise kernels against their references, on every instruction set."""

from typing import Any

import numpy as np
import pytest

from tests.support.kernels import (
    KernelCall,
    KernelLibrary,
    assert_close,
    available_isas,
    compile_kernels,
)
from tests.support.operands import Array, random_array, scalar
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import NUMPY_DTYPES

ROWS = 7
# A multiple of no vector length; more than one of each; and a real model's.
WIDTHS = (1, 43, 576)


def epilogue(rng: np.random.Generator, out_dtype: str, width: int) -> dict[str, Array | None]:
    """The scales of a quantised output: both for i8 (SmoothQuant), one for E4M3."""
    return {
        "pre_scale": rng.uniform(0.5, 2, width).astype(np.float32) if out_dtype == "i8" else None,
        "out_scale": scalar(0.03) if out_dtype in ("i8", "f8e4m3") else None,
    }


def rms_norm(rng: np.random.Generator, dtype: str, out_dtype: str, width: int) -> KernelCall:
    residual = out_dtype != "f8e4m3"
    inputs: dict[str, Any] = {
        "x": random_array(rng, ROWS, width, dtype=dtype, spread=3),
        "residual": random_array(rng, ROWS, width, dtype=dtype) if residual else None,
        "weight": random_array(rng, width),
    }
    return KernelCall(
        REGISTRY["rms_norm"],
        {"eps": 1e-5, "out_dtype": out_dtype},
        inputs | epilogue(rng, out_dtype, width),
        optional_outputs=("total",) if residual else (),
    )


def swiglu(
    rng: np.random.Generator, dtype: str, out_dtype: str, width: int, activation: str = "silu"
) -> KernelCall:
    fused = random_array(rng, ROWS, 2 * width + 5, dtype=dtype, spread=4)
    inputs = {"gate": fused[:, :width], "up": fused[:, width + 5 :]}
    return KernelCall(
        REGISTRY["swiglu"],
        {"activation": activation, "out_dtype": out_dtype},
        inputs | epilogue(rng, out_dtype, width),
    )


def quantize(rng: np.random.Generator, dtype: str, out_dtype: str, width: int) -> KernelCall:
    inputs = {"x": random_array(rng, ROWS, width, dtype=dtype, spread=5)}
    scales = epilogue(rng, out_dtype, width)
    if out_dtype == dtype:  # a plain pre-quantisation scale
        scales["pre_scale"] = rng.uniform(0.5, 2, width).astype(np.float32)
    return KernelCall(REGISTRY["quantize"], {"out_dtype": out_dtype}, inputs | scales)


def movers(rng: np.random.Generator, dtype: str, width: int) -> list[KernelCall]:
    x = random_array(rng, ROWS, width, dtype=dtype)
    rows = np.array([6, 0, 0, 3], np.int32)
    table = random_array(rng, 11, width, dtype="bf16")
    return [
        KernelCall(REGISTRY["add"], {}, {"x": x, "y": random_array(rng, ROWS, width, dtype=dtype)}),
        KernelCall(REGISTRY["gather_rows"], {}, {"x": x, "rows": rows}),
        KernelCall(
            REGISTRY["embedding"],
            {"scale": 5.656854, "out_dtype": dtype},
            {"token_ids": np.array([10, 0, 4, 4], np.int32), "table": table},
        ),
        KernelCall(
            REGISTRY["embedding"],
            {"out_dtype": dtype},
            {
                "token_ids": np.array([10, 0], np.int32),
                "table": random_array(rng, 11, width, dtype=dtype),
            },
        ),
    ]


def grid() -> list[KernelCall]:
    rng = np.random.default_rng(20)
    calls = []
    for width in WIDTHS:
        for dtype in ("f32", "bf16"):
            for out_dtype in (dtype, "f8e4m3", "i8"):
                calls += [
                    make(rng, dtype, out_dtype, width) for make in (rms_norm, swiglu, quantize)
                ]
            calls.append(swiglu(rng, dtype, dtype, width, "gelu_tanh"))
            calls += movers(rng, dtype, width)
    return calls


GRID = grid()


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return compile_kernels(GRID, request.param)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_kernels_agree_with_references(library, num_threads):
    for call in GRID:
        assert_close(call, library.run(call, num_threads))


def sliced(call: KernelCall, rows: slice) -> KernelCall:
    """The same call over some of its rows."""
    varying = {
        parameter.name for parameter in call.op.inputs if parameter.axes[:1] == ("M",)
    } & set(call.inputs)
    inputs = {
        name: array[rows] if name in varying and array is not None else array
        for name, array in call.inputs.items()
    }
    return KernelCall(call.op, call.attributes, inputs, call.optional_outputs)


def test_a_row_does_not_depend_on_the_others(library):
    for call in GRID:
        if call.op.name == "gather_rows":
            continue
        whole = library.run(call, 2)
        for rows in (slice(0, 1), slice(2, 5)):
            for name, part in library.run(sliced(call, rows)).items():
                assert part.tobytes() == np.ascontiguousarray(whole[name][rows]).tobytes()


def test_no_rows_is_no_work(library):
    for call in GRID:
        if call.op.name != "gather_rows":
            outputs = library.run(sliced(call, slice(0, 0)), 2)
            assert all(output.shape[0] == 0 for output in outputs.values())


def like(call: KernelCall, **arrays: Array) -> KernelCall:
    return KernelCall(call.op, call.attributes, {**call.inputs, **arrays}, call.optional_outputs)


def find(name: str, dtype: str, out_dtype: str, width: int = 43) -> KernelCall:
    return next(
        call
        for call in GRID
        if call.op.name == name
        and call.attributes.get("activation", "silu") == "silu"
        and call.attributes["out_dtype"] == out_dtype
        and call.types[call.op.inputs[0].name].dtype == dtype
        and call.types[call.op.inputs[0].name].shape[1] == width
    )


def test_rms_norm_of_zeros_is_zero(library):
    call = find("rms_norm", "bf16", "f8e4m3")
    zeros = like(call, x=np.zeros_like(call.inputs["x"]))
    assert (library.run(zeros)["out"].astype(np.float32) == 0).all()


@pytest.mark.parametrize("out_dtype", ["bf16", "f8e4m3", "i8"])
def test_swiglu_of_extreme_gates(library, out_dtype):
    """exp overflows below -88: the activation is 0 there, not NaN."""
    call = find("swiglu", "bf16", out_dtype)
    gate = np.tile(
        np.array([-3e38, -1000, -89, -88, 0, 88, 89, 1000, 3e38], np.float32), (ROWS, 5)
    )[:, :43].astype(NUMPY_DTYPES["bf16"])
    up = np.full((ROWS, 43), 0.5, np.float32).astype(gate.dtype)
    extreme = like(call, gate=gate, up=up)
    outputs = library.run(extreme)
    assert not np.isnan(outputs["out"].astype(np.float32)).any()
    assert_close(extreme, outputs)


@pytest.mark.parametrize("out_dtype", ["f8e4m3", "i8"])
def test_quantize_saturates(library, out_dtype):
    call = find("quantize", "bf16", out_dtype)
    x = np.full((ROWS, 43), 1e30, np.float32).astype(NUMPY_DTYPES["bf16"])
    x[:, ::2] *= -1
    big = like(call, x=x)
    assert_close(big, library.run(big))
