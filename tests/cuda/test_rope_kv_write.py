"""rope_kv_write as it is lowered for a GPU, by Triton's interpreter, against its reference."""

import numpy as np
import pytest

from tests.support.kernels import KernelCall
from tests.support.lowered import run_lowered
from tests.support.operands import scalar
from tests.support.rope_calls import ROWS, assert_rope_close, grid, rope_call
from tests.support.triton_kernels import needs_triton

needs_triton()

GRID = grid()


@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("stale", [0, 3])
@pytest.mark.parametrize("call", GRID, ids=lambda call: str(call.attributes["head_dim"]))
def test_the_kernels_agree_with_their_reference(call: KernelCall, stale: int, variant: int) -> None:
    assert_rope_close(call, run_lowered(call, stale=stale, variant=variant))


@pytest.mark.parametrize("present", ["q_norm", "k_norm", "v_norm", "q_scale", "k_scale", "v_scale"])
def test_each_optional_input_comes_alone(present: str) -> None:
    call = rope_call(
        np.random.default_rng(5),
        "bf16",
        "f8e4m3",
        32,
        16,
        normed=True,
        scaled=True,
        normed_values=True,
    )
    names = ("q_norm", "k_norm", "v_norm", "q_scale", "k_scale", "v_scale")
    optional = dict.fromkeys(names)
    alone = {**call.inputs, **optional, present: call.inputs[present]}
    one = KernelCall(call.op, call.attributes, alone)
    assert_rope_close(one, run_lowered(one))


def test_values_are_divided_as_the_reference_divides_them() -> None:
    """Quotients near the middle of two E4M3: an approximate division takes the other one."""
    call = rope_call(np.random.default_rng(6), "f32", "f8e4m3", 64, 64, normed=False)
    values = np.asarray(call.inputs["v"])
    steps = np.random.default_rng(7).integers(-64, 64, values.shape)
    middles = (16 + steps % 8 + 0.5) * np.sign(steps + 0.5) * np.float32(0.37)
    inputs = {**call.inputs, "v": middles.astype(np.float32), "v_scale": scalar(0.37)}
    one = KernelCall(call.op, call.attributes, inputs)
    assert_rope_close(one, run_lowered(one))


@pytest.mark.parametrize("call", GRID, ids=lambda call: str(call.attributes["head_dim"]))
def test_a_row_does_not_depend_on_the_others(call: KernelCall) -> None:
    varying = ("q", "k", "v", "positions", "slots")
    whole = run_lowered(call)
    pool = call.inputs["pool"]
    for row in range(ROWS):
        one = {name: np.asarray(call.inputs[name])[row : row + 1] for name in varying}
        alone = run_lowered(
            KernelCall(call.op, call.attributes, {**call.inputs, **one, "pool": pool})
        )
        assert alone["q_out"].tobytes() == whole["q_out"][row].tobytes()
        pool = alone["pool_out"]
    assert np.asarray(pool).tobytes() == whole["pool_out"].tobytes()
