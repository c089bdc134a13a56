"""The operators that select tokens as they are lowered for a GPU, by Triton's interpreter, against
their references; and compiled for the sizes of published models."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.compiled import compiled, together
from tests.support.index_calls import (
    IndexHistory,
    IndexShape,
    in_engine,
    positions_of,
    random_history,
    select_call,
    step_of,
    write_calls,
)
from tests.support.kernels import KernelCall, assert_close
from tests.support.lowered import run_lowered, site_of
from tests.support.triton_kernels import needs_triton
from trtc.protos.manifest import Limits

needs_triton()

from trtc.builder.targets.gpu.lowerings import lowerings  # noqa: E402

SHAPES = {
    "f32": IndexShape("f32", "f32", 5, 8, page_size=8),
    "20 heads": IndexShape("f32", "f32", 20, 24, top_k=37),
    "fp8": IndexShape("f32", "f8e4m3", 16, 16, top_k=1),
}
FEW = ((1, 1), (1, 20), (3, 21), (2, 100), (1, 300))
"""(new tokens, context): all keys of a program's share, and those behind them."""
MANY = ((1, 1), (60, 60), (1, 70), (13, 50), (1, 300))


@pytest.mark.parametrize("kinds", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_right_tokens_are_selected(name: str, kinds: tuple[tuple[int, int], ...]) -> None:
    """Of whole numbers, whose scores are often equal; a program has some keys of a row, or rows."""
    call = step_of(SHAPES[name], kinds)
    found = run_lowered(call, stale=2, variant=0 if kinds is FEW else -1)["selected"]
    np.testing.assert_array_equal(found, call.reference()["selected"])


def test_keys_beyond_a_programs_share_are_scored() -> None:
    """Two programs share 1,000 keys, 512 at a time."""
    rng, shape = np.random.default_rng(3), IndexShape("f32", "f32", 16, 16, top_k=900)
    history = random_history(rng, shape, 1000, whole=True)
    call = in_engine(select_call(rng, shape, [(history, 2, 1000)]))
    found = run_lowered(call, variant=0)["selected"]
    np.testing.assert_array_equal(found, call.reference()["selected"])


@pytest.mark.parametrize("variant", [0, -1])
def test_fractions_select_alike(variant: int) -> None:
    """Without ties, as the interpreter's products may be rounded otherwise."""
    call = step_of(IndexShape("f32", "f32", 16, 24), ((9, 90),), whole=False)
    found = run_lowered(call, variant=variant)["selected"]
    np.testing.assert_array_equal(found, call.reference()["selected"])


@pytest.mark.parametrize("variant", [0, -1])
def test_scores_that_are_no_numbers_count_as_the_smallest(variant: int) -> None:
    rng, shape = np.random.default_rng(3), SHAPES["f32"]
    history = random_history(rng, shape, 60, whole=True)
    keys = history.keys.copy()
    keys[10:45] = np.nan
    broken = IndexHistory(history.q, history.weights, keys)
    call = in_engine(select_call(rng, shape, [(broken, 9, 60)]))
    found = run_lowered(call, variant=variant)["selected"]
    np.testing.assert_array_equal(found, call.reference()["selected"])
    assert {10, 11, 12} < set(positions_of(call, found)[0])


@pytest.mark.parametrize("call", write_calls(), ids=lambda call: str(call.inputs["pool"].dtype))
def test_writes_agree_with_the_reference(call: KernelCall) -> None:
    outputs, expected = run_lowered(call), call.reference()
    assert_close(call, {"q_out": outputs["q_out"], "pool_out": expected["pool_out"]})
    found, wanted = (x.astype(np.float32) for x in (outputs["pool_out"], expected["pool_out"]))
    within = {"float32": 1e-5, "bfloat16": 1 / 64, "float8_e4m3fn": 1 / 8}[
        str(outputs["pool_out"].dtype)
    ]
    assert (np.abs(found - wanted) <= within * np.abs(wanted) + within).all()


@pytest.mark.parametrize("heads", [64, 32])
def test_selection_of_published_sizes_compiles(heads: int) -> None:
    """DeepSeek-V3.2's and GLM-5's: the 2,048 best of 131,072 tokens, by heads of 128 channels."""
    shape = IndexShape(num_heads=heads, width=128, top_k=2048)
    rng = np.random.default_rng(0)
    call = select_call(rng, shape, [(random_history(rng, shape, 1), 1, 1)])
    call = replace(call, attributes={**call.attributes, "max_context": 1 << 17})
    limits = Limits(max_batch_size=256, max_seq_len=1 << 17, max_num_tokens=8192)
    variants = lowerings()["select_tokens"](replace(site_of(call, "tokens", 90), limits=limits))
    assert [len(variant.work) for variant in variants] == [2, 1]
    assert max(sum(one.scratch.values()) for one in variants) < 1 << 28
    assert len(list(compiled(together(variants), 90))) == 3
