"""The kernel of gated short convolutions, and its state in pages."""

import numpy as np
import pytest

from tests.support.conv_calls import PAGE_SIZE, STEP, Sequences, cases
from tests.support.kernels import KernelLibrary, assert_close, available_isas, compile_kernels

CASES = cases()


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return compile_kernels([case.call(case.step()) for case in CASES], request.param)


def test_the_reference_is_torchs_convolution_over_the_pieces() -> None:
    case = Sequences("f32", 24, 2, bias=True)
    first = case.call(case.history()).reference()
    outputs = case.call(case.step(), first["state_out"]).reference()["out"]
    at = 0
    for number, (context, new) in enumerate(STEP):
        expected = case.torch_outputs(number)[context - new :]
        np.testing.assert_allclose(outputs[at : at + new], expected, atol=1e-5)
        at += new


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.channels}")
def test_kernels_agree_with_references(
    library: KernelLibrary, case: Sequences, num_threads: int
) -> None:
    """Nothing but the sequences' own pages is read: the others hold NaN."""
    before = case.call(case.history()).reference()["state_out"]
    call = case.call(case.step(), before)
    outputs, expected = library.run(call, num_threads), call.reference()
    assert_close(call, {"out": outputs["out"], "state_out": expected["state_out"]})
    assert outputs["state_out"].tobytes() == expected["state_out"].tobytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.channels}")
def test_neither_company_nor_pieces_change_a_bit(library: KernelLibrary, case: Sequences) -> None:
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
        pages = case.table[number, : -(-context // PAGE_SIZE)]
        assert state[pages].tobytes() == together["state_out"][pages].tobytes()
