"""Linears with narrow weights: the Triton kernels by the interpreter, against the reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.kernels import KernelCall, assert_close
from tests.support.linear_calls import Case, linear_call, take_rows
from tests.support.lowered import run_lowered, site_of
from tests.support.triton_kernels import Work, interpret_work, needs_triton
from trtc.plugins.gpu.lowering import Launch
from trtc.plugins.gpu.sources import KernelSource
from trtc.plugins.iq4 import values_of
from trtc.plugins.products import e8m0_values, scales_in_units
from trtc.plugins.rounding import cast
from trtc.plugins.six_bits import join
from trtc.plugins.tiles import CHANNELS, untile, untile_groups
from trtc.protos.errors import UnsupportedError
from trtc.protos.manifest import Limits

needs_triton()

from trtc.plugins.gemm import mixed_input  # noqa: E402

CASES = [
    Case("bf16", "i4", 48, 256, 128, layout="tiles", bias=True, residual=True, softcap=3.0),
    Case("bf16", "u4", 80, 384, 64, zero=True, layout="tiles", residual=True, softcap=2.0),
    Case("bf16", "i4", 37, 96, 32, layout="row_major", softcap=2.0),
    Case("bf16", "i4", 16, 40, layout="row_major", out="f32"),
    Case("bf16", "u4", 70, 72, 16, zero=True, layout="row_major", residual=True),
    Case("bf16", "i8", 70, 131, layout="row_major", residual=True),
    Case("i8", "i8", 40, 150, layout="row_major", input_scale=True, bias=True, out="f32"),
    Case("i8", "i8", 70, 128, layout="row_major", input_scale=True),
    Case("i8", "i8", 70, 128, layout="row_major", scales=1, residual=True),
    Case("bf16", "f8e4m3", 48, 256, 128, layout="row_major", bias=True),
    Case("f8e4m3", "f8e4m3", 70, 256, 128, layout="row_major", scales=2, residual=True),
    Case("f8e4m3", "f8e4m3", 40, 96, 32, layout="row_major", scales=1, out="f32"),
    Case("f32", "i4", 33, 64, 32, layout="row_major", out="f32"),
    Case("f32", "u4", 16, 128, 32, zero=True, layout="tiles", out="f32"),
    Case("f32", "i8", 16, 21, layout="row_major", out="f32"),
    Case("bf16", "iq4", 48, 256, 32, layout="tiles", bytes=True, bias=True, softcap=3.0),
    Case("bf16", "iq4", 37, 96, 16, layout="row_major", bytes=True, residual=True),
    Case("f32", "iq4", 16, 64, 32, layout="row_major", out="f32"),
    Case("bf16", "f4e2m1", 48, 256, 32, layout="tiles", powers=True, bias=True, softcap=3.0),
    Case("bf16", "f4e2m1", 37, 96, 16, layout="row_major", bytes=True, residual=True),
    Case("f32", "f4e2m1", 16, 64, 32, layout="row_major", powers=True, out="f32"),
    Case("f32", "f4e2m1", 16, 64, 16, layout="row_major", bytes=True, out="f32"),
    Case("bf16", "i6", 70, 384, 128, layout="split", bias=True, residual=True),
    Case("f32", "i6", 16, 256, 128, layout="split", out="f32"),
]
WIDENED = [
    Case("bf16", "i4", 48, 256, 128, layout="tiles", bias=True),
    Case("bf16", "u4", 37, 96, 32, zero=True, layout="row_major"),
    Case("bf16", "iq4", 48, 256, 32, layout="tiles", bytes=True, bias=True),
    Case("bf16", "f4e2m1", 48, 256, 32, layout="tiles", powers=True, bias=True),
    Case("bf16", "f4e2m1", 37, 96, 16, layout="row_major", bytes=True),
    Case("bf16", "i6", 48, 256, 128, layout="split", bias=True),
    Case("bf16", "i8", 21, 150, layout="row_major", residual=True),
    Case("bf16", "f8e4m3", 48, 256, 128, layout="row_major"),
]


def tiles_work(work: Work) -> Any:
    """`run_lowered` with multiply_mixed_input for many rows, whatever other ways there are."""
    variants = mixed_input.lower_mixed_input(work.arguments[0])
    number = max(at for at, variant in enumerate(variants) if len(variant.work) == 1)
    return interpret_work(replace(work, pick=number))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_agree_with_the_reference(case: Case) -> None:
    call = linear_call(np.random.default_rng(7), case)
    assert_close(call, run_lowered(call, run=tiles_work))


@pytest.mark.parametrize("case", WIDENED, ids=str)
def test_widened_weights_are_those_that_the_graph_rounds_to_bf16(case: Case) -> None:
    call = linear_call(np.random.default_rng(8), case)
    widened = KernelCall(
        call.op,
        {**call.attributes, "weight_dtype": "bf16", "layout": "row_major", "group_size": 0},
        {
            "x": call.inputs["x"],
            "weight": dequantised(call, case),
            "bias": call.inputs.get("bias"),
            "residual": call.inputs.get("residual"),
        },
    )
    assert_close(widened, run_lowered(call))


def dequantised(call: KernelCall, case: Case) -> np.ndarray:
    weight, scale, zero = (
        call.inputs.get(name) for name in ("weight", "weight_scale", "weight_zero")
    )
    if case.layout == "tiles":
        weight, scale, zero = untile(weight, CHANNELS), untile_groups(scale), untile_groups(zero)
    if case.layout == "split":
        weight = join(weight, case.columns, case.depth)
    if case.weight == "iq4":
        weight = values_of(weight)
    if case.bytes:
        scale = scales_in_units(scale, call.inputs["scale_unit"], case.weight)
    if case.powers:
        scale = e8m0_values(scale)
    values = weight.astype(np.float32)
    group = case.group or case.depth
    if zero is not None:
        values -= np.repeat(zero.astype(np.float32), group, axis=1)
    return cast(values * np.repeat(scale, group, axis=1), "bf16")


def test_a_row_does_not_depend_on_the_others() -> None:
    call = linear_call(np.random.default_rng(9), CASES[0])
    whole = run_lowered(call, run=tiles_work)["out"]
    for rows in (slice(0, 1), slice(5, 12)):
        some = run_lowered(take_rows(call, rows), run=tiles_work)["out"]
        assert some.tobytes() == np.ascontiguousarray(whole[rows]).tobytes()


def ends(case: Case, most: int, sm: int = 90) -> list[int]:
    """Rows up to which each variant runs."""
    call = linear_call(np.random.default_rng(0), case)
    site = replace(site_of(call, "tokens", sm), limits=Limits(64, 1024, most))
    return [variant.max_rows for variant in mixed_input.lower_mixed_input(site)]


def test_variants_cover_all_rows_of_a_site() -> None:
    tiled, capped, row_major, of_i8 = WIDENED[0], CASES[1], CASES[2], CASES[7]
    (split,) = (case for case in WIDENED if case.layout == "split")
    assert ends(tiled, 2048) == [1, 8, 16, 32, 64, 128, 256, 2048]
    assert ends(tiled, 50) == [1, 8, 16, 32, 50]
    assert ends(tiled, 50, sm=80) == [1, 8, 16, 32, 50]
    assert ends(tiled, 2048, sm=80) == [1, 8, 16, 32, 2048]
    assert ends(capped, 2048) == [1, 8, 16, 32, 64, 128, 256, 2048]
    assert ends(split, 2048) == [1, 8, 16, 32, 2048]
    assert ends(row_major, 64) == [32, 64]
    assert ends(of_i8, 2048) == [32, 64, 2048]


@pytest.mark.parametrize(
    ("case", "block"),
    [
        (Case("bf16", "i8", 32, 21, layout="row_major"), 128),
        (Case("bf16", "i8", 32, 150, layout="row_major"), 128),
        (Case("bf16", "i4", 32, 160, 16, layout="row_major"), 16),
        (Case("bf16", "i4", 32, 160, 32, layout="row_major"), 32),
        (Case("bf16", "i4", 32, 512, 256, layout="row_major"), 128),
    ],
    ids=str,
)
def test_weights_are_widened_in_blocks_of_one_group(case: Case, block: int) -> None:
    site = site_of(linear_call(np.random.default_rng(0), case), "tokens", 90)
    widen, _ = mixed_input.lower_mixed_input(site)[-1].work
    assert isinstance(widen, Launch) and isinstance(widen.kernel, KernelSource)
    assert widen.kernel.constants["BLOCK_K"] == block


def test_groups_too_small_to_sum_apart_are_refused() -> None:
    case = Case("bf16", "i4", 16, 64, 8, layout="row_major")
    call = linear_call(np.random.default_rng(0), case)
    with pytest.raises(UnsupportedError, match="8 input channels share a scale"):
        mixed_input.lower_mixed_input(site_of(call, "tokens", 90))
