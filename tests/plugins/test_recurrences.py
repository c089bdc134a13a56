"""The kernels of gated delta nets, of Mamba and Mamba-2, and their states in pages."""

import numpy as np
import pytest

from tests.support import delta_calls, scan_calls, ssm_calls
from tests.support.elementwise import quantize_of
from tests.support.kernels import KernelLibrary, assert_close, available_isas, compile_kernels

Case = delta_calls.Deltas | ssm_calls.Recurrences | scan_calls.Scans
CASES: list[Case] = [*delta_calls.cases(), *ssm_calls.cases(), *scan_calls.cases()]
CODES = ("f8e4m3", "i8")
by_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    calls = [case.call(case.step()) for case in CASES]
    calls += [
        delta_calls.quantized(case.call(case.step()), out_dtype)
        for case in delta_calls.cases()
        for out_dtype in CODES
    ]
    return compile_kernels(calls, request.param)


def assert_states_close(case: Case, found: np.ndarray, expected: np.ndarray) -> None:
    """Pages that nobody wrote hold NaN still."""
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [one for one in CASES if one.dtype == "f32"], ids=str)
def test_the_references_are_transformers_chunks_over_the_pieces(case: Case) -> None:
    first = case.call(case.history()).reference()
    outputs = case.call(case.step(), first["state_out"]).reference()["out"]
    at = 0
    for number, (context, new) in enumerate(case.lengths):
        expected = case.torch_outputs(number)[context - new :]
        np.testing.assert_allclose(outputs[at : at + new], expected, atol=2e-5)
        at += new


@by_case
@pytest.mark.parametrize("num_threads", [1, 2])
def test_kernels_agree_with_references(
    library: KernelLibrary, case: Case, num_threads: int
) -> None:
    """Nothing but the sequences' own pages is read: the others hold NaN."""
    before = case.call(case.history()).reference()["state_out"]
    call = case.call(case.step(), before)
    outputs, expected = library.run(call, num_threads), call.reference()
    assert_close(call, {"out": outputs["out"], "state_out": expected["state_out"]})
    assert_states_close(case, outputs["state_out"], expected["state_out"])


@by_case
def test_neither_batches_nor_chunks_change_a_bit(library: KernelLibrary, case: Case) -> None:
    before = library.run(case.call(case.history()))["state_out"]
    together = library.run(case.call(case.step(), before), 2)
    for number, (context, new) in enumerate(case.lengths):
        at = sum(n for _, n in case.lengths[:number])
        state = before
        for row in range(new):
            begin = context - new + row
            alone = library.run(case.call([(number, begin, begin + 1)], state))
            assert alone["out"].tobytes() == together["out"][at + row].tobytes()
            state = alone["state_out"]
        pages = case.table[number, : -(-context // case.page_size)]
        assert state[pages].tobytes() == together["state_out"][pages].tobytes()


@pytest.mark.parametrize("out_dtype", CODES)
@pytest.mark.parametrize("case", delta_calls.cases(), ids=str)
def test_delta_nets_give_what_a_quantize_after_them_gives(
    library: KernelLibrary, case: delta_calls.Deltas, out_dtype: str
) -> None:
    call = case.call(case.step(), case.call(case.history()).reference()["state_out"])
    quantized = delta_calls.quantized(call, out_dtype)
    plain, found = library.run(call), library.run(quantized)
    codes = quantize_of(quantized, plain["out"]).reference()["out"]
    assert found["out"].tobytes() == codes.tobytes()
    assert found["state_out"].tobytes() == plain["state_out"].tobytes()
    assert_close(quantized, {**quantized.reference(), "out": found["out"]})


@by_case
def test_each_draft_leaves_its_own_state(library: KernelLibrary, case: Case) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.drafted_call(before, as_sequences=False)
    outputs, expected = library.run(call, 2), call.reference()
    assert_close(call, {"out": outputs["out"], "state_out": expected["state_out"]})
    assert_states_close(case, outputs["state_out"], expected["state_out"])


@by_case
def test_the_state_before_the_last_token_can_be_kept(library: KernelLibrary, case: Case) -> None:
    before = case.call(case.history()).reference()["state_out"]
    call = case.kept_call(case.step(), before)
    outputs, expected = library.run(call, 2), call.reference()
    assert_states_close(case, outputs["state_out"], expected["state_out"])
    again = [(one, end - 1, end) for one, _, end in case.step()]
    alone = case.call(again, outputs["state_out"]).reference()["out"]
    last = expected["out"][call.inputs["query_start"][1:] - 1]
    np.testing.assert_allclose(alone.astype(np.float32), last.astype(np.float32), atol=1e-2)
