"""The kernels that write K and V into the paged pool."""

import numpy as np
import pytest

from tests.support.kernels import (
    KernelCall,
    KernelLibrary,
    available_isas,
    compile_kernels,
)
from tests.support.rope_calls import ROWS, assert_rope_close, grid
from trtc.plugins.registry import REGISTRY


def kv_write_call(rope: KernelCall) -> KernelCall:
    names = ("k", "v", "pool", "slots", "k_scale", "v_scale")
    attributes = {name: rope.attributes[name] for name in ("num_kv_heads", "head_dim")}
    inputs = {name: rope.inputs.get(name) for name in names}
    return KernelCall(REGISTRY["kv_write"], attributes, inputs)


GRID = grid()
WRITES = [kv_write_call(call) for call in GRID]


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return compile_kernels(GRID + WRITES, request.param)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("call", GRID + WRITES, ids=lambda call: call.op.name)
def test_kernels_agree_with_references(library, call, num_threads):
    outputs = library.run(call, num_threads)
    expected = call.reference()
    pool, expected_pool = outputs["pool_out"], expected["pool_out"]
    if call.op.name == "kv_write":
        assert pool.tobytes() == expected_pool.tobytes()
        return
    assert_rope_close(call, outputs)


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


def test_position_zero_is_not_rotated(library):
    call = next(c for c in GRID if "q_norm" not in c.inputs and c.types["q"].dtype == "f32")
    still = KernelCall(
        call.op, call.attributes, {**call.inputs, "positions": np.zeros(ROWS, np.int32)}
    )
    assert library.run(still)["q_out"].tobytes() == np.asarray(call.inputs["q"]).tobytes()
