"""The kernels of convolutions, gated or not, and their states in pages."""

import numpy as np
import pytest

from tests.support.conv_calls import Convolutions, cases
from tests.support.kernels import KernelLibrary, assert_close, available_isas, compile_kernels
from tests.support.state_calls import STEP

CASES = cases()


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return compile_kernels([case.call(case.step()) for case in CASES], request.param)


@pytest.mark.parametrize(
    ("op", "bias"), [("short_conv", True), ("causal_conv", False), ("causal_conv", True)]
)
def test_the_reference_is_torchs_convolution_over_the_pieces(op: str, bias: bool) -> None:
    case = Convolutions(op, "f32", 24, 2, bias=bias)
    first = case.call(case.history()).reference()
    outputs = case.call(case.step(), first["state_out"]).reference()["out"]
    at = 0
    for number, (context, new) in enumerate(STEP):
        expected = case.torch_outputs(number)[context - new :]
        np.testing.assert_allclose(outputs[at : at + new], expected, atol=1e-5)
        at += new


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_agree_with_references(
    library: KernelLibrary, case: Convolutions, num_threads: int
) -> None:
    """Nothing but the sequences' own pages is read: the others hold NaN."""
    before = case.call(case.history()).reference()["state_out"]
    call = case.call(case.step(), before)
    outputs, expected = library.run(call, num_threads), call.reference()
    assert_close(call, {"out": outputs["out"], "state_out": expected["state_out"]})
    assert outputs["state_out"].tobytes() == expected["state_out"].tobytes()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_neither_batches_nor_chunks_change_a_bit(
    library: KernelLibrary, case: Convolutions
) -> None:
    before = library.run(case.call(case.history()))["state_out"]
    together = library.run(case.call(case.step(), before), 2)
    for number, (context, new) in enumerate(STEP):
        at = sum(n for _, n in STEP[:number])
        state = before
        for row in range(new):
            begin = context - new + row
            alone = library.run(case.call([(number, begin, begin + 1)], state))
            assert alone["out"].tobytes() == together["out"][at + row].tobytes()
            state = alone["state_out"]
        pages = case.table[number, : -(-context // case.page_size)]
        assert state[pages].tobytes() == together["state_out"][pages].tobytes()


def test_the_reference_leaves_what_each_draft_leaves_alone() -> None:
    """Rows that check drafts, as sequences or not: the outputs and states of tokens one by one."""
    case = Convolutions("short_conv", "f32", 24, 2, bias=True)
    before = case.call(case.history()).reference()["state_out"]
    expected = [
        (one, at, case.call([(one, begin, at + 1)], before).reference())
        for one, begin, end in case.drafted()
        for at in range(begin, end)
    ]
    for as_sequences in (False, True):
        found = case.drafted_call(before, as_sequences=as_sequences).reference()
        for row, (one, at, alone) in enumerate(expected):
            np.testing.assert_array_equal(found["out"][row], alone["out"][-1])
            begin = next(part[1] for part in case.drafted() if part[0] == one)
            np.testing.assert_array_equal(
                found["state_out"][case.draft_pages[one, at - begin]],
                alone["state_out"][case.table[one, at // case.page_size]],
            )
        undrafted = np.setdiff1d(np.arange(case.num_pages), case.draft_pages)
        np.testing.assert_array_equal(found["state_out"][undrafted], before[undrafted])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_draft_leaves_its_own_state(library: KernelLibrary, case: Convolutions) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.drafted_call(before, as_sequences=False)
    outputs, expected = library.run(call, 2), call.reference()
    assert_close(call, {"out": outputs["out"], "state_out": expected["state_out"]})
    assert outputs["state_out"].tobytes() == expected["state_out"].tobytes()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_state_before_the_last_token_can_be_kept(
    library: KernelLibrary, case: Convolutions
) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.kept_call(case.step(), before)
    outputs, expected = library.run(call, 2), call.reference()
    assert outputs["state_out"].tobytes() == expected["state_out"].tobytes()
    again = [(one, end - 1, end) for one, _, end in case.step()]
    alone = case.call(again, outputs["state_out"]).reference()["out"]
    assert_close(call, {"out": outputs["out"], "state_out": expected["state_out"]})
    np.testing.assert_array_equal(alone, expected["out"][call.inputs["query_start"][1:] - 1])
