"""gated_delta, mamba1 and mamba2 as they are lowered for a GPU, by Triton's interpreter, against
their references."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.support import delta_calls, scan_calls, ssm_calls
from tests.support.kernels import KernelCall, assert_close
from tests.support.lowered import run_lowered
from tests.support.triton_kernels import needs_triton

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
    assert_agree(call, run_lowered(call, stale=stale, variant=variant))


@by_case
def test_drafts_go_on_from_the_rows_before_them(case: Case, variant: int) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.drafted_call(before, as_sequences=True)
    assert_agree(call, run_lowered(call, variant=variant))


@by_case
def test_the_state_before_the_last_token_can_be_kept(case: Case, variant: int) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.kept_call(case.decode() if variant == DECODE else case.step(), before)
    assert_agree(call, run_lowered(call, variant=variant))


def assert_agree(call: KernelCall, outputs: Mapping[str, Any]) -> None:
    """Pages that nobody wrote hold NaN still."""
    expected = call.reference()
    assert_close(call, {"out": outputs["out"], "state_out": expected["state_out"]})
    np.testing.assert_allclose(outputs["state_out"], expected["state_out"], rtol=1e-4, atol=1e-5)
