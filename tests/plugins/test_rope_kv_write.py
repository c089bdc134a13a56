"""The kernel that rotates Q and K and writes K and V into the paged pool."""

import numpy as np
import pytest

from tests.support.kernels import (
    KernelCall,
    KernelLibrary,
    available_isas,
    compile_kernels,
)
from tests.support.rope_calls import KV_HEADS, ROWS, assert_rope_close, grid
from trtc.plugins.kv_pool import PagedHeads

GRID = grid()


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return compile_kernels(GRID, request.param)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("call", GRID, ids=lambda call: str(call.attributes["head_dim"]))
def test_kernels_agree_with_references(library, call, num_threads):
    assert_rope_close(call, library.run(call, num_threads))


@pytest.mark.parametrize("call", GRID, ids=lambda call: str(call.attributes["head_dim"]))
def test_a_row_does_not_depend_on_the_others(library, call):
    varying = ("q", "k", "v", "positions", "slots")
    whole = library.run(call, 2)
    pool = call.inputs["pool"]
    for row in range(ROWS):
        one = {name: call.inputs[name][row : row + 1] for name in varying}
        alone = library.run(
            KernelCall(call.op, call.attributes, {**call.inputs, **one, "pool": pool})
        )
        assert alone["q_out"].tobytes() == whole["q_out"][row].tobytes()
        pool = alone["pool_out"]
    assert pool.tobytes() == whole["pool_out"].tobytes()


@pytest.mark.parametrize("pool", ["i8", "u8"])
def test_keys_and_values_that_are_not_finite_get_a_scale_that_is_not(library, pool):
    call = next(c for c in GRID if c.types["pool"].dtype == pool and "v_norm" not in c.inputs)
    rows, head_dim = {name: np.array(call.inputs[name]) for name in ("k", "v")}, 64
    rows["k"][1, 5], rows["v"][2, head_dim + 1] = np.nan, np.inf
    spoilt = KernelCall(call.op, call.attributes, {**call.inputs, **rows})
    written = PagedHeads(library.run(spoilt)["pool_out"], head_dim)
    assert written.scales is not None
    pages, offsets = np.divmod(call.inputs["slots"], written.codes.shape[2])
    for plane, row, head in ((0, 1, 0), (1, 2, 1)):
        expected = np.zeros((ROWS, KV_HEADS), bool)
        expected[row, head] = True
        np.testing.assert_array_equal(np.isnan(written.scales[pages, plane, offsets]), expected)


def test_position_zero_is_not_rotated(library):
    call = next(c for c in GRID if "q_norm" not in c.inputs and c.types["q"].dtype == "f32")
    still = KernelCall(
        call.op, call.attributes, {**call.inputs, "positions": np.zeros(ROWS, np.int32)}
    )
    assert library.run(still)["q_out"].tobytes() == np.asarray(call.inputs["q"]).tobytes()
