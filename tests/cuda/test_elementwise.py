"""Row-wise operators as they are lowered for a GPU, by Triton's interpreter, against references."""

import numpy as np
import pytest

from tests.support.elementwise import (
    ROWS,
    WIDTHS,
    and_normed,
    by_row,
    epilogue,
    grid,
    int8_tables,
    into_rows,
    iq4_tables,
    like,
    lookup_call,
    quantize_of,
    rms_norm,
    rms_scale,
    six_bit_table,
    sliced,
    swiglu,
    turned,
    unquantized,
)
from tests.support.kernels import KernelCall, assert_close
from tests.support.lowered import RowAxis, run_lowered
from tests.support.operands import random_array, scalar
from tests.support.triton_kernels import needs_triton
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import NUMPY_DTYPES, cast

needs_triton()

GRID = grid()


def name_of(call: KernelCall) -> str:
    first, out = call.op.inputs[0].name, call.op.outputs[0].name
    dtypes = f"{call.types[first].dtype}-{call.output_types[out].dtype}"
    return f"{call.op.name}-{dtypes}-{call.output_types[out].shape[-1]}"


@pytest.mark.parametrize("call", GRID, ids=name_of)
def test_kernels_agree_with_references(call: KernelCall) -> None:
    assert_close(call, run_lowered(call))


@pytest.mark.parametrize("rows", ["tokens", "rows"])
def test_kernels_count_the_rows_of_their_axis(rows: RowAxis) -> None:
    for call in GRID:
        if call.op.name != "gather_rows" and call.output_types["out"].shape[-1] == 43:
            assert_close(call, run_lowered(call, rows=rows, stale=40))


def test_a_row_may_take_several_programs() -> None:
    rng = np.random.default_rng(0)
    for out_dtype in ("bf16", "f8e4m3"):
        for make in (rms_norm, swiglu):
            call = make(rng, "bf16", out_dtype, 4424)
            assert_close(call, run_lowered(call))


def test_a_wide_row_is_rotated_in_parts() -> None:
    call = turned(by_row(np.random.default_rng(0), "bf16", "i8", 8256), 64)
    assert_close(call, run_lowered(call))


@pytest.mark.parametrize("width", [*WIDTHS, 4424])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_rank_scales_its_part_of_a_row(dtype: str, width: int) -> None:
    call = rms_scale(np.random.default_rng(3), dtype, width)
    for rows in ("tokens", "rows"):
        assert_close(call, run_lowered(call, rows=rows, stale=40))


@pytest.mark.parametrize("residual", ["f32", "bf16", None])
@pytest.mark.parametrize("out_dtype", ["f32", "bf16", "f8e4m3", "i8"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rms_norm_with_every_residual_and_scale(
    dtype: str, out_dtype: str, residual: str | None
) -> None:
    rng = np.random.default_rng(1)
    call = rms_norm(rng, dtype, out_dtype, 576)
    more = random_array(rng, ROWS, 576, dtype=residual) if residual else None
    scales = {"pre_scale": rng.uniform(0.5, 2, 576).astype(np.float32), "out_scale": scalar(0.02)}
    for given in ({}, scales):
        for total in ((), ("total",)) if residual else ((),):
            inputs = {
                **call.inputs,
                "residual": more,
                "pre_scale": None,
                "out_scale": None,
                **given,
            }
            one = KernelCall(call.op, call.attributes, inputs, total)
            outputs = run_lowered(one)
            assert_close(one, outputs)
            if total:
                assert outputs["total"].tobytes() == one.reference()["total"].tobytes()


def test_a_program_of_several_rows_gives_each_what_one_gives_it() -> None:
    """A row's sum has one order, whatever the step."""
    rng = np.random.default_rng(2)
    for stale in (0, 3, 19):
        call = rms_norm(rng, "bf16", "f8e4m3", 576)
        few, many = (run_lowered(call, variant=at, stale=stale) for at in (0, -1))
        assert_close(call, few)
        assert few["out"].tobytes() == many["out"].tobytes()


def test_a_row_does_not_depend_on_the_others() -> None:
    for call in GRID:
        if call.op.name == "gather_rows" or call.output_types["out"].shape[-1] != 576:
            continue
        whole = run_lowered(call)
        for rows in (slice(0, 1), slice(2, 5)):
            for name, part in run_lowered(sliced(call, rows)).items():
                assert part.tobytes() == np.ascontiguousarray(whole[name][rows]).tobytes()


@pytest.mark.parametrize(("scales", "block"), [(1, 0), (9, 0), (1, 64)])
@pytest.mark.parametrize("out_dtype", ["f8e4m3", "i8"])
def test_norms_and_gates_give_rows_their_scales(out_dtype: str, scales: int, block: int) -> None:
    rng = np.random.default_rng(3)
    for make in (rms_norm, swiglu):
        call = turned(into_rows(make(rng, "bf16", out_dtype, 576), scales), block)
        few, many = (run_lowered(call, variant=at) for at in (0, -1))
        reference = call.reference()
        # One ulp of bf16 in the largest value.
        assert np.allclose(few["row_scale"], reference["row_scale"], rtol=1 / 128)
        assert_close(call, {**few, "row_scale": reference["row_scale"]})
        for name, values in few.items():
            assert values.tobytes() == many[name].tobytes()


@pytest.mark.parametrize("out_dtype", ["f8e4m3", "i8"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_norm_of_two_results_gives_what_a_quantize_after_it_gives(
    dtype: str, out_dtype: str
) -> None:
    """Bit for bit, and by the scales of rows too."""
    static = rms_norm(np.random.default_rng(4), dtype, out_dtype, 576)
    by_rows = into_rows(static, 9)
    for call in (static, by_rows, turned(by_rows, 64)):
        both = run_lowered(and_normed(call))
        assert both["normed"].tobytes() == run_lowered(unquantized(call))["out"].tobytes()
        for name, values in run_lowered(quantize_of(call, both["normed"])).items():
            assert both[name].tobytes() == values.tobytes()


@pytest.mark.parametrize("out_dtype", ["f8e4m3", "i8"])
def test_quantize_rounds_ties_to_even_and_saturates(out_dtype: str) -> None:
    halves = np.concatenate(
        (np.arange(-20, 20) + 0.5, [1e30, -1e30, 3e38, 447.9, 464, -480, 127.5, -128.5, 0, -0.0])
    )
    steps = np.exp2(np.arange(-12, 9))[:, None] * (1 + np.arange(16) / 16)  # ties of E4M3
    values = np.concatenate((halves, steps.reshape(-1), -steps.reshape(-1)))
    x = np.tile(cast(values.astype(np.float32), "f32"), (ROWS, 1))
    for out_scale in (1.0, 0.25, 0.03):
        call = KernelCall(
            REGISTRY["quantize"],
            {"out_dtype": out_dtype},
            {"x": x * np.float32(out_scale), "out_scale": scalar(out_scale)},
        )
        assert_close(call, run_lowered(call))


def test_a_nan_stays_one_in_e4m3() -> None:
    x = np.full((ROWS, 40), np.nan, np.float32)
    inputs = {"x": x, "out_scale": scalar(0.5)}
    call = KernelCall(REGISTRY["quantize"], {"out_dtype": "f8e4m3"}, inputs)
    assert np.isnan(run_lowered(call)["out"].astype(np.float32)).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_swiglu_of_extreme_gates(dtype: str, activation: str) -> None:
    """exp overflows below -88: the activation is 0 there, not NaN."""
    values = np.array([-3e38, -1000, -89, -88, -5, -1e-30, 0, 1e-3, 88, 1000, 3e38], np.float32)
    gate = np.tile(values, (ROWS, 5))[:, :43].astype(NUMPY_DTYPES[dtype])
    call = swiglu(np.random.default_rng(2), dtype, dtype, 43, activation)
    extreme = like(call, gate=gate, up=np.full((ROWS, 43), 0.5, np.float32).astype(gate.dtype))
    assert_close(extreme, run_lowered(extreme))


@pytest.mark.parametrize("scale", [1.0, 5.656854])
@pytest.mark.parametrize("out_dtype", ["f32", "bf16"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_embedding_converts_and_stays_in_its_table(
    dtype: str, out_dtype: str, scale: float
) -> None:
    table = random_array(np.random.default_rng(3), 11, 576, dtype=dtype)
    call = lookup_call([10, 0, 4, 4], table, out_dtype, scale)
    assert_close(call, run_lowered(call))
    wild = like(call, token_ids=np.array([-1, 11, 1 << 30, 3], np.int32))
    held = like(call, token_ids=np.array([0, 10, 10, 3], np.int32))
    assert run_lowered(wild)["out"].tobytes() == held.reference()["out"].tobytes()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_int8_table_is_scaled_by_groups(dtype: str) -> None:
    rows_of_groups, *_ = int8_tables(np.random.default_rng(5), dtype, 72)
    assert_close(rows_of_groups, run_lowered(rows_of_groups))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_iq4_table_lies_in_rows_or_tiles(dtype: str) -> None:
    for call in iq4_tables(np.random.default_rng(8), dtype, 256):
        if call.attributes["layout"] != "packed":  # which CPU engines have
            assert_close(call, run_lowered(call))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_table_of_six_bits_is_split(dtype: str) -> None:
    call = six_bit_table(np.random.default_rng(9), dtype, 384, layout="split")
    assert_close(call, run_lowered(call))


@pytest.mark.parametrize("out_dtype", ["bf16", "f8e4m3"])
def test_swiglu_of_few_rows_has_the_same_bits(out_dtype: str) -> None:
    call = swiglu(np.random.default_rng(6), "bf16", out_dtype, 1100)
    few, many = (run_lowered(call, variant=variant)["out"] for variant in (0, 1))
    assert few.tobytes() == many.tobytes()
    assert_close(call, {"out": few})


def test_the_epilogue_of_swiglu_takes_either_scale() -> None:
    rng = np.random.default_rng(4)
    call = swiglu(rng, "bf16", "f8e4m3", 96)
    scales = epilogue(rng, "i8", 96)
    for name in ("pre_scale", "out_scale"):
        one = like(call, **{"pre_scale": None, "out_scale": None, name: scales[name]})
        assert_close(one, run_lowered(one))
