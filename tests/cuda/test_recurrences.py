"""gated_delta, mamba1 and mamba2 as they are lowered for a GPU, by Triton's interpreter, against
their references."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support import delta_calls, scan_calls, ssm_calls
from tests.support.elementwise import quantize_of
from tests.support.kernels import KernelCall, assert_close
from tests.support.lowered import run_lowered
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gpu.lowering import Launch, Site, Variant
from trtc.plugins.gpu.sources import KernelSource

needs_triton()

Case = delta_calls.Deltas | ssm_calls.Recurrences | scan_calls.Scans
CASES: list[Case] = [*delta_calls.cases(), *ssm_calls.cases()]
DECODE, ANY, ONLY = 0, 1, -1
by_case = pytest.mark.parametrize(
    ("case", "variant"),
    [
        *((case, variant) for case in CASES for variant in (DECODE, ANY)),
        *((case, ONLY) for case in scan_calls.cases()),
    ],
    ids=str,
)


@by_case
@pytest.mark.parametrize("stale", [0, 3])
def test_the_kernels_agree_with_their_reference(case: Case, variant: int, stale: int) -> None:
    """Nothing but the sequences' own pages is read: the others hold NaN."""
    before = case.call(case.history()).reference()["state_out"]
    call = case.call(case.decode() if variant == DECODE else case.step(), before)
    outputs = run_lowered(call, stale=stale, variant=variant)
    assert_agree(call, outputs, tf32=by_tf32(case, variant))


@by_case
def test_drafts_go_on_from_the_rows_before_them(case: Case, variant: int) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.drafted_call(before, as_sequences=True)
    assert_agree(call, run_lowered(call, variant=variant), tf32=by_tf32(case, variant))


@by_case
def test_the_state_before_the_last_token_can_be_kept(case: Case, variant: int) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.kept_call(case.decode() if variant == DECODE else case.step(), before)
    assert_agree(call, run_lowered(call, variant=variant), tf32=by_tf32(case, variant))


@pytest.mark.parametrize("case", ssm_calls.cases(), ids=str)
@pytest.mark.parametrize("variant", [DECODE, ANY])
def test_the_norm_may_be_left_to_all_ranks(case: ssm_calls.Recurrences, variant: int) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.call(case.decode() if variant == DECODE else case.step(), before)
    call = ssm_calls.without_norm(call)
    outputs, expected = run_lowered(call, variant=variant), call.reference()
    tf32 = by_tf32(case, variant)
    assert_agree(call, outputs, tf32=tf32)
    np.testing.assert_allclose(
        outputs["squares"], expected["squares"], rtol=2.0**-8 if tf32 else 2e-5
    )


@pytest.mark.parametrize("variant", [DECODE, ANY])
@pytest.mark.parametrize(
    ("case", "out_dtype"),
    [(case, ("f8e4m3", "i8")[at % 2]) for at, case in enumerate(delta_calls.cases())],
    ids=str,
)
def test_delta_nets_give_what_a_quantize_after_them_gives(
    case: delta_calls.Deltas, variant: int, out_dtype: str
) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.call(case.decode() if variant == DECODE else case.step(), before)
    quantized = delta_calls.quantized(call, out_dtype)
    plain, found = (run_lowered(one, variant=variant) for one in (call, quantized))
    codes = quantize_of(quantized, plain["out"]).reference()["out"]
    assert found["out"].tobytes() == codes.tobytes()


def test_delta_nets_of_many_sequences_agree_in_wide_blocks() -> None:
    case = next(case for case in delta_calls.cases() if case.value_dim > 64)
    before = case.call(case.history()).reference()["state_out"]
    call = case.call(case.step(), before)
    assert_agree(call, run_lowered(call, lower=f"{__name__}:lower_in_wide_blocks"))


def lower_in_wide_blocks(site: Site) -> tuple[Variant, ...]:
    """The last launch of chunks takes all steps, not those of many sequences alone."""
    from trtc.plugins.gated_delta.cuda import lower

    *_, variant = lower(site)
    solve, narrow, wide, norm = variant.work
    assert isinstance(narrow, Launch) and isinstance(wide, Launch)
    assert isinstance(wide.kernel, KernelSource)
    taken = int(narrow.kernel.constants["MOST_SEQUENCES"]) + 1
    assert wide.kernel.constants["LEAST_SEQUENCES"] == taken > 1
    kernel = replace(wide.kernel, constants={**wide.kernel.constants, "LEAST_SEQUENCES": 0})
    return (replace(variant, work=(solve, replace(wide, kernel=kernel), norm)),)


def assert_agree(call: KernelCall, outputs: Mapping[str, Any], *, tf32: bool = False) -> None:
    """Pages that nobody wrote hold NaN still."""
    expected = call.reference()
    assert_close(call, {**expected, "out": outputs["out"]})
    rtol, atol = (2.0**-8, 2.0**-8) if tf32 else (1e-4, 1e-5)
    np.testing.assert_allclose(outputs["state_out"], expected["state_out"], rtol=rtol, atol=atol)


def by_tf32(case: Case, variant: int) -> bool:
    """Whether products have the state as an operand, cut off as GPUs do it: those of chunks."""
    return case.dtype == "bf16" and variant == ANY
