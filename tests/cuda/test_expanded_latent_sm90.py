"""Expanded latent attention in tiles of sm_90: prefill_sm90.cu on the CPU, thread by thread."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.few_programs import launches
from tests.support.kernels import Array, KernelCall, assert_close
from tests.support.latent_calls import LatentShape, expanded_call, expanding, step_of
from tests.support.lowered import run_lowered, site_of
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gpu.sources import KernelSource

needs_triton()

from trtc.plugins.expanded_latent_attention.cuda import lower  # noqa: E402

SHAPE = LatentShape(num_heads=2, nope_dim=48, rotary_dim=16, value_dim=48)
"""Panels of 64 channels of which values fill a part."""
DEEPSEEK = LatentShape(num_heads=2, nope_dim=128, rotary_dim=64, value_dim=128)
"""Its heads alone: keys in three panels, values in two."""
STEP = ((1, 1), (300, 300), (3, 70), (150, 200), (32, 32), (5, 5), (129, 257))
"""(new tokens, context)"""
TAKEN = (1, 3, 4)
"""With 32 new tokens or more, while there is room for 896: the last one asks for 384 of 128."""


def call_of(shape: LatentShape, **attributes: int) -> KernelCall:
    given = {"least_new": 32, "room": 896, **attributes}
    return expanded_call(shape, expanding(step_of(shape, STEP), **given))


def run(call: KernelCall) -> Array:
    lowered = "tests.support.few_programs:expanded_latent_attention"
    return run_lowered(call, stale=0, sm=90, lower=lowered)["out"]


def rows_of(call: KernelCall, sequences: tuple[int, ...]) -> list[int]:
    starts = [int(start) for start in np.asarray(call.inputs["query_start"])]
    return [row for one in sequences for row in range(starts[one], starts[one + 1])]


@pytest.mark.parametrize("shape", [SHAPE, DEEPSEEK], ids=["64, 48", "192, 128"])
def test_prompts_are_attended_to_while_there_is_room(shape: LatentShape) -> None:
    call = call_of(shape)
    out = run(call)
    assert_close(call, {"out": out})
    changed = (out != np.asarray(call.inputs["attended"])).any(axis=1)
    assert np.flatnonzero(changed).tolist() == rows_of(call, TAKEN)


def test_a_longer_context_than_a_selection_holds_is_passed_over() -> None:
    call = call_of(SHAPE, most_context=200)
    out = run(call)
    assert_close(call, {"out": out})
    changed = (out != np.asarray(call.inputs["attended"])).any(axis=1)
    assert np.flatnonzero(changed).tolist() == rows_of(call, (3, 4))


def test_a_row_depends_neither_on_its_chunk_nor_on_the_batch() -> None:
    """The last 150 of 300 tokens, with blocks of which the first chunk has seen a part."""
    call = call_of(SHAPE)
    together = run(call)
    _, whole, *_ = STEP
    begin, end = rows_of(call, (1,))[whole[0] - 150], rows_of(call, (1,))[-1] + 1
    row_axes = {"attended", "q"}
    inputs = {
        name: array[begin:end] if name in row_axes and array is not None else array
        for name, array in call.inputs.items()
    } | {
        "query_start": np.asarray([0, 150], np.int32),
        "context_lens": np.asarray(call.inputs["context_lens"])[1:2],
        "page_table": np.asarray(call.inputs["page_table"])[1:2],
    }
    alone = run(replace(call, inputs=inputs))
    np.testing.assert_array_equal(alone, together[begin:end])


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, dtype="f32", pool_dtype="f32"),
        replace(SHAPE, nope_dim=24),  # no whole operands of the tensor cores
        replace(SHAPE, value_dim=272),  # sums beyond a consumer's registers
    ],
)
def test_what_sm_90_cannot_hold_goes_through_triton(shape: LatentShape) -> None:
    *_, prompts = lower(site_of(call_of(shape), "tokens", 90))
    assert isinstance(launches(prompts)[-1].kernel, KernelSource)
