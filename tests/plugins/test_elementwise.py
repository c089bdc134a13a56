"""Row-wise kernels against their references, on every instruction set."""

import numpy as np
import pytest

from tests.support.elementwise import (
    ROWS,
    cpu_grid,
    grid,
    iq4_tables,
    like,
    quantize_of,
    sliced,
    unquantized,
)
from tests.support.kernels import (
    KernelCall,
    KernelLibrary,
    assert_close,
    available_isas,
    compile_kernels,
)
from tests.support.weights import in_memory
from trtc.plugins.rounding import NUMPY_DTYPES

GRID = [*grid(), *cpu_grid()]
NORMS_OF_TWO = [call for call in GRID if "normed" in call.optional_outputs]
IQ4_TABLES = [
    call
    for width in (64, 288)
    for dtype in ("f32", "bf16")
    for call in iq4_tables(np.random.default_rng(9), dtype, width)
]


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    calls = [*GRID, *map(unquantized, NORMS_OF_TWO), *map(in_memory, IQ4_TABLES)]
    return compile_kernels(calls, request.param)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_kernels_agree_with_references(library, num_threads):
    for call in GRID:
        assert_close(call, library.run(call, num_threads))


def test_tables_of_4_bits_are_looked_up_in_rows_and_panels(library):
    assert {call.attributes["layout"] for call in IQ4_TABLES} == {"row_major", "packed"}
    for call in IQ4_TABLES:
        assert_close(call, library.run(in_memory(call)))


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


def test_a_norm_of_two_results_gives_what_a_quantize_after_it_gives(library):
    """Bit for bit."""
    assert {call.output_types["out"].dtype for call in NORMS_OF_TWO} == {"f8e4m3", "i8"}
    for call in NORMS_OF_TWO:
        both = library.run(call)
        assert both["normed"].tobytes() == library.run(unquantized(call))["out"].tobytes()
        codes = quantize_of(call, both["normed"]).reference()["out"]
        assert both["out"].tobytes() == codes.tobytes()


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
