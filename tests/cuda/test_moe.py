"""Routed experts as they are lowered for a GPU, by Triton's interpreter, against the reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.kernels import KernelCall, assert_close
from tests.support.lowered import run_lowered, site_of
from tests.support.moe_calls import (
    CASES,
    EXPERTS,
    GPT_OSS,
    ROWS,
    Case,
    moe_call,
    take_rows,
    with_experts,
)
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gpu.lowering import Launch, Site, Variant
from trtc.plugins.gpu.sources import CudaSource
from trtc.protos.errors import UnsupportedError
from trtc.protos.manifest import Limits

needs_triton()

from trtc.plugins.moe import cuda as moe  # noqa: E402

CUDA_CASES = [
    *(
        replace(
            case,
            layout="row_major",
            e8m0=case.weight == "f4e2m1" and not case.units,
            words=case.units,
        )
        for case in CASES
        if case.quant != "dynamic_i8"
    ),
    Case("bf16", "u4", 48, 32, 16, zero=True, layout="row_major"),
    Case("bf16", "i4", 256, 128, 128, layout="tiles", pre_scale=True),
    Case("f32", "i8", 33, 24, layout="row_major", top_k=3),
    Case("bf16", "i8", 33, 24, quant="dynamic_i8", layout="row_major"),
    Case("bf16", "i8", 96, 64, quant="dynamic_i8", hadamard=32, layout="row_major"),
    Case("bf16", "i4", 256, 128, 128, layout="tiles", ordered=True),
    Case("bf16", "iq4", 256, 128, 32, layout="tiles"),
    Case("bf16", "i6", 256, 128, 128, layout="split"),
    Case("bf16", "f4e2m1", 224, 176, 16, layout="row_major", units=True, words=True),
    Case("bf16", "f4e2m1", 96, 160, 32, layout="row_major", units=True, words=True),
    Case("bf16", "f4e2m1", 96, 48, 16, layout="row_major", e8m0=True),
]
CALLS = [moe_call(np.random.default_rng(80 + i), case) for i, case in enumerate(CUDA_CASES)]
IN_PAIRS, IN_BLOCKS = 0, -1  # variants


def site(call: KernelCall, most: int) -> Site:
    return replace(site_of(call, "tokens", 90), limits=Limits(64, 1024, most))


def few(call: KernelCall) -> KernelCall:
    return take_rows(call, slice(3, 3 + moe.PAIR_ROWS - 1))


@pytest.mark.parametrize("call", CALLS, ids=[str(case) for case in CUDA_CASES])
def test_kernels_agree_with_reference(call: KernelCall) -> None:
    assert_close(few(call), run_lowered(few(call), variant=IN_PAIRS, stale=1))
    some = take_rows(call, slice(0, 23))
    assert_close(some, run_lowered(some, variant=IN_BLOCKS))


E4M3 = [
    call
    for call, case in zip(CALLS, CUDA_CASES, strict=True)
    if case.weight == "f8e4m3" == case.quant.removeprefix("dynamic_")
]


@pytest.mark.parametrize("call", E4M3, ids=lambda call: str(call.attributes["act_quant"]))
def test_blocks_of_e4m3_grow_with_the_pairs_of_an_expert(call: KernelCall) -> None:
    found = moe.lower(site(call, 1024))
    blocks = [one.work[2].kernel.constants["BLOCK_M"] for one in found[1:]]  # type: ignore[union-attr]
    assert blocks == [16, 16, 32, 64]
    for variant in (1, 2, 3):
        some = take_rows(call, slice(0, min(23, found[variant].max_rows)))
        assert_close(some, run_lowered(some, variant=variant))


OF_A_RANK = [
    Case("f32", "f32", 24, 20, layout="row_major", expert_scale=True),
    Case("bf16", "i8", 33, 24, quant="i8", pre_scale=True, layout="row_major"),
    Case("bf16", "f8e4m3", 48, 40, quant="dynamic_f8e4m3", pre_scale=True, layout="row_major"),
    Case("bf16", "f8e4m3", 48, 40, quant="f8e4m3", router="weighs inputs", layout="row_major"),
    Case("bf16", "i4", 256, 128, 128, layout="tiles"),
    Case("bf16", "i4", 256, 128, 128, layout="tiles", ordered=True),
    Case("f32", "f4e2m1", 64, 32, 32, layout="row_major", e8m0=True, **GPT_OSS),
    Case("bf16", "f4e2m1", 96, 48, 16, layout="row_major", units=True, words=True),
]


@pytest.mark.parametrize("case", OF_A_RANK, ids=str)
def test_experts_of_other_ranks_add_nothing(case: Case) -> None:
    """Their results are poison, which is not read."""
    call = with_experts(moe_call(np.random.default_rng(90), case), range(1, 3))
    assert_close(few(call), run_lowered(few(call), variant=IN_PAIRS, stale=1))
    some = take_rows(call, slice(0, 23))
    assert_close(some, run_lowered(some, variant=IN_BLOCKS))


TILES, WIDE = 2, 3
ON_SM90 = {IN_PAIRS: 3, 1: 6, TILES: 40, WIDE: 40}
"""Rows by the variants of sm_90: pairs, blocks of 8, tiles, and tiles of many rows."""
TWO_BLOCKS = "tests.support.moe_calls:lower_for_two_blocks"
"""So that a thread block has several blocks of pairs, and many tiles of each."""


def on_sm90(rows: int = ROWS, **changed: Any) -> KernelCall:
    """Of E2M1 experts: K in whole chunks and others, more rows of an expert than a block has."""
    kwargs = {"layout": "row_major", "e8m0": True, "top_k": 3, **GPT_OSS, **changed}
    case = Case("bf16", "f4e2m1", 832, 192, 32, **kwargs)
    return moe_call(np.random.default_rng(91), case, rows)


@pytest.mark.parametrize("variant", ON_SM90)
@pytest.mark.parametrize(
    "change", [{}, {"activation": "silu", "bias": False, "limit": 0.0}], ids=str
)
def test_e2m1_experts_of_few_rows_on_sm90(variant: int, change: dict[str, Any]) -> None:
    call = take_rows(on_sm90(**change), slice(5, 5 + ON_SM90[variant]))
    assert kernel_of(variant) in entries_of(call, variant)
    assert_close(call, run_lowered(call, variant=variant, stale=1, sm=90, lower=TWO_BLOCKS))


@pytest.mark.parametrize("variant", ON_SM90)
def test_a_row_of_e2m1_experts_does_not_depend_on_the_others(variant: int) -> None:
    call = on_sm90()
    rows = ON_SM90[variant]
    last = take_rows(call, slice(rows - 1, rows))
    whole = run_lowered(take_rows(call, slice(0, rows)), variant=variant, sm=90)["out"]
    alone = run_lowered(last, variant=variant, sm=90, lower=TWO_BLOCKS)["out"]
    assert alone.tobytes() == whole[-1:].tobytes()


@pytest.mark.parametrize("variant", ON_SM90)
def test_e2m1_experts_of_other_ranks_add_nothing_on_sm90(variant: int) -> None:
    call = take_rows(with_experts(on_sm90(), range(1, 5)), slice(0, ON_SM90[variant] // 3))
    assert kernel_of(variant) in entries_of(call, variant)
    assert_close(call, run_lowered(call, variant=variant, sm=90, lower=TWO_BLOCKS))


def test_experts_of_e2m1_have_any_number_of_rows_on_sm90() -> None:
    """Whole blocks and a part of one, each size of a product, and none."""
    call = on_sm90(rows=92)
    logits = np.full((92, EXPERTS), -9.0, np.float32)
    logits[:, 1] = 2
    for first, size, expert in ((0, 50, 0), (50, 20, 2), (70, 22, 4)):
        logits[first : first + size, expert] = 1
    call = replace(call, inputs={**call.inputs, "router_logits": logits})
    assert "experts_e2m1_tiles" in entries_of(call, TILES)
    assert_close(call, run_lowered(call, variant=TILES, stale=1, sm=90, lower=TWO_BLOCKS))


def test_experts_of_e2m1_may_have_more_rows_than_a_block_on_sm90() -> None:
    """A whole block and a part of one, in both sizes of a product, and experts without rows."""
    case = Case("bf16", "f4e2m1", 320, 64, 32, layout="row_major", e8m0=True, top_k=1, **GPT_OSS)
    call = moe_call(np.random.default_rng(92), case, 300)
    logits = np.zeros((300, EXPERTS), np.float32)
    logits[:200, 1] = 1
    logits[200:, 4] = 1
    call = replace(call, inputs={**call.inputs, "router_logits": logits})
    assert kernel_of(WIDE) in entries_of(call, WIDE)
    assert_close(call, run_lowered(call, variant=WIDE, stale=1, sm=90, lower=TWO_BLOCKS))


def test_other_experts_of_e2m1_are_multiplied_by_triton_on_sm90() -> None:
    """Sizes that are no whole tiles, inputs that are rewritten first, or scales in units."""
    for change in (
        {"hidden": 352},
        {"inner": 160},
        {"pre_scale": True},
        {"parts": 1, "activation": "relu2"},
        {"group": 16, "e8m0": False, "units": True, "words": True},
    ):
        kwargs: dict[str, Any] = {"hidden": 320, "inner": 192, "group": 32, "e8m0": True}
        kwargs |= GPT_OSS | change
        if change.get("parts") == 1:
            kwargs |= {"limit": 0.0, "up_offset": 0.0}
        case = Case("bf16", "f4e2m1", layout="row_major", **kwargs)
        call = moe_call(np.random.default_rng(0), case)
        assert not any(entries_of(call, variant) for variant in range(len(lowered(call))))


def kernel_of(variant: int) -> str:
    return {TILES: "experts_e2m1_tiles", WIDE: "experts_e2m1_wide"}.get(variant, "experts_e2m1")


def lowered(call: KernelCall) -> tuple[Variant, ...]:
    return moe.lower(site_of(call, "tokens", 90))


def entries_of(call: KernelCall, variant: int) -> set[str]:
    launches = lowered(call)[variant].work
    kernels = [launch.kernel for launch in launches if isinstance(launch, Launch)]
    return {kernel.entry for kernel in kernels if isinstance(kernel, CudaSource)}


@pytest.mark.parametrize("variant", [IN_PAIRS, IN_BLOCKS])
def test_a_row_does_not_depend_on_the_others(variant: int) -> None:
    call = CALLS[3]
    whole = run_lowered(few(call), variant=variant, stale=1)["out"]
    for row in range(len(whole)):
        alone = run_lowered(take_rows(few(call), slice(row, row + 1)), variant=variant, stale=1)
        assert alone["out"].tobytes() == whole[row : row + 1].tobytes()


@pytest.mark.parametrize("variant", [IN_PAIRS, IN_BLOCKS])
def test_experts_that_nobody_chose_are_not_read(variant: int) -> None:
    call = few(CALLS[2])
    logits = np.zeros_like(call.inputs["router_logits"])
    logits[:, [1, 4]] = 5, 4
    weights = {name: call.inputs[name].copy() for name in ("gate_up", "down")}
    call = replace(call, inputs={**call.inputs, "router_logits": logits})
    expected = run_lowered(call, variant=variant, stale=1)["out"]
    for array in weights.values():
        array[[0, 2, 3]] = np.nan
    poisoned = replace(call, inputs={**call.inputs, **weights})
    assert run_lowered(poisoned, variant=variant, stale=1)["out"].tobytes() == expected.tobytes()


def test_all_rows_may_choose_one_expert() -> None:
    """More rows than a block has, and experts without any."""
    call = CALLS[2]
    logits = np.zeros((ROWS, EXPERTS), np.float32)
    logits[:, 3] = 5
    call = replace(call, inputs={**call.inputs, "router_logits": logits})
    assert_close(call, run_lowered(call, variant=IN_BLOCKS))


def test_equal_logits_choose_the_lower_experts() -> None:
    call = few(CALLS[0])
    logits = np.zeros_like(call.inputs["router_logits"])
    call = replace(call, inputs={**call.inputs, "router_logits": logits})
    for variant in (IN_PAIRS, IN_BLOCKS):
        assert_close(call, run_lowered(call, variant=variant, stale=1))


def test_variants_end_with_the_most_rows_and_share_their_kernels() -> None:
    variants = moe.lower(site(CALLS[2], 20000))
    assert [variant.max_rows for variant in variants] == [4, 64, 1024, 20000]
    assert [len(variant.work) for variant in variants] == [4, 5, 5, 5]
    assert variants[-1].work[:2] == variants[-2].work[:2]
    assert [variant.max_rows for variant in moe.lower(site(CALLS[2], 64))] == [4, 64]
    assert [variant.max_rows for variant in moe.lower(site(CALLS[2], 3))] == [3]


def test_activations_of_the_cpu_target_are_refused() -> None:
    case = next(case for case in CASES if case.quant == "dynamic_i8")
    call = moe_call(np.random.default_rng(0), replace(case, layout="row_major"))
    with pytest.raises(UnsupportedError, match="do not multiply i4 so"):
        moe.lower(site(call, 64))
