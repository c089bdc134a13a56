"""short_conv as it is lowered for a GPU, by Triton's interpreter, against its reference."""

import numpy as np
import pytest

from tests.support.conv_calls import Convolutions, cases
from tests.support.kernels import assert_close
from tests.support.lowered import run_lowered
from tests.support.triton_kernels import needs_triton

needs_triton()

DECODE, ANY = 0, 1
CASES = cases()
by_case = pytest.mark.parametrize("case", CASES, ids=str)


@by_case
@pytest.mark.parametrize("variant", [DECODE, ANY])
@pytest.mark.parametrize("stale", [0, 3])
def test_the_kernels_agree_with_their_reference(
    case: Convolutions, variant: int, stale: int
) -> None:
    """Nothing but the sequences' own pages is read: the others hold NaN."""
    before = case.call(case.history()).reference()["state_out"]
    call = case.call(case.decode() if variant == DECODE else case.step(), before)
    outputs, expected = run_lowered(call, stale=stale, variant=variant), call.reference()
    assert_close(call, {"out": outputs["out"], "state_out": expected["state_out"]})
    assert np.asarray(outputs["state_out"]).tobytes() == expected["state_out"].tobytes()


@by_case
def test_a_decode_is_a_step_of_one_token(case: Convolutions) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.call(case.decode(), before)
    one, other = run_lowered(call, variant=DECODE), run_lowered(call, variant=ANY)
    assert one["out"].tobytes() == other["out"].tobytes()
    assert np.asarray(one["state_out"]).tobytes() == np.asarray(other["state_out"]).tobytes()


@by_case
@pytest.mark.parametrize("variant", [DECODE, ANY])
def test_drafts_go_on_from_the_rows_before_them(case: Convolutions, variant: int) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.drafted_call(before, as_sequences=True)
    outputs, expected = run_lowered(call, variant=variant), call.reference()
    assert_close(call, {"out": outputs["out"], "state_out": expected["state_out"]})
    assert np.asarray(outputs["state_out"]).tobytes() == expected["state_out"].tobytes()


@by_case
@pytest.mark.parametrize("variant", [DECODE, ANY])
def test_the_state_before_the_last_token_can_be_kept(case: Convolutions, variant: int) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.kept_call(case.decode() if variant == DECODE else case.step(), before)
    outputs, expected = run_lowered(call, variant=variant), call.reference()
    assert_close(call, {"out": outputs["out"], "state_out": expected["state_out"]})
    assert np.asarray(outputs["state_out"]).tobytes() == expected["state_out"].tobytes()
