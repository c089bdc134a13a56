"""Steps of one token of delta nets on sm_90 (decode_sm90.cu), on the CPU thread by thread."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.cuda_on_cpu import launch
from tests.support.delta_calls import LARGE, LARGE_BY_CHANNEL, Deltas, quantized
from tests.support.kernels import KernelCall, assert_close
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gpu.sources import CudaSource
from trtc.protos.manifest import Limits

needs_triton()

from tests.support.compiled import compile_sources  # noqa: E402
from tests.support.lowered import RunWork, run_lowered, site_of  # noqa: E402
from tests.support.triton_kernels import Work  # noqa: E402
from trtc.plugins.gated_delta.cuda import lower  # noqa: E402
from trtc.plugins.gated_delta.cuda_decode_sm90 import decode_launch, takes  # noqa: E402

BLOCKS, STAGES = 3, 2
"""So that a block takes heads of several sequences, and a ring goes round."""
HEADS = 4


def small(shape: tuple[Any, ...], **kind: Any) -> Deltas:
    """Few heads of that size."""
    dtype, key_heads, key_dim, _, value_dim, page_size = shape
    keys = min(key_heads, HEADS if kind else HEADS // 2)
    return Deltas(dtype, keys, key_dim, HEADS, value_dim, page_size, **kind)


CASES = [small(LARGE[1]), small(LARGE_BY_CHANNEL[1], by_channel=True)]
by_case = pytest.mark.parametrize("case", CASES, ids=str)


def on_cpu(*, lazy: bool = False) -> RunWork:
    def run(work: Work) -> Any:
        (site,) = work.arguments
        launched = decode_launch(site)
        source = launched.kernel
        assert isinstance(source, CudaSource)
        source = replace(source, constants={**source.constants, "BLOCKS": BLOCKS, "STAGES": STAGES})
        given = [work.arrays[name] for name in launched.arguments]
        launch(source, given, (BLOCKS, 1, 1), lazy=lazy)
        return work.arrays

    return run


def states_before(case: Deltas) -> Any:
    """Pages that nobody wrote hold NaN."""
    return case.call(case.history()).reference()["state_out"]


def assert_agrees(call: KernelCall, *, lazy: bool = False) -> None:
    found, expected = run_lowered(call, run=on_cpu(lazy=lazy), sm=90), call.reference()
    assert_close(call, {"out": found["out"], "state_out": expected["state_out"]})
    np.testing.assert_allclose(found["state_out"], expected["state_out"], rtol=1e-4, atol=1e-5)


@by_case
def test_the_kernel_agrees_with_the_reference(case: Deltas) -> None:
    """Of sequences that go on, and of those that begin; nothing but their own pages is read."""
    begin = [(one, 0, 1) for one in range(2)]
    going_on = [part for part in case.decode() if part[0] > 1]
    assert_agrees(case.call([*begin, *going_on], states_before(case)))
    assert_agrees(quantized(case.call(case.decode(), states_before(case)), "f8e4m3"), lazy=True)


@by_case
def test_drafts_go_on_from_the_rows_before_them(case: Deltas) -> None:
    assert_agrees(case.drafted_call(states_before(case), as_sequences=True))


@by_case
def test_the_state_before_the_last_token_can_be_kept(case: Deltas) -> None:
    assert_agrees(case.kept_call(case.decode(), states_before(case)))


@by_case
def test_a_sequence_does_not_depend_on_the_others(case: Deltas) -> None:
    before = states_before(case)
    parts = case.decode()
    together = run_lowered(case.call(parts, before), run=on_cpu(), sm=90)
    for number, part in enumerate(parts[:2]):
        alone = run_lowered(case.call([part], before), run=on_cpu(), sm=90)
        assert alone["out"].tobytes() == together["out"][number : number + 1].tobytes()


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("out_dtype", ["bf16", "f8e4m3"])
def test_it_compiles(by_channel: bool, out_dtype: str) -> None:
    case = CASES[by_channel]
    call = case.call(case.decode())
    call = quantized(call, out_dtype) if out_dtype != "bf16" else call
    (kernel,) = compile_sources([decode_launch(site_of(call, "tokens", 90)).kernel], 90)
    for instruction in (b"cp.async.bulk", b"griddepcontrol.wait", b"st.global.v4"):
        assert instruction in kernel.ptx


def test_steps_of_several_sequences_take_it() -> None:
    case = CASES[0]
    site = site_of(case.call(case.decode()), "tokens", 90)
    kinds = [(one.kind, one.max_rows, len(one.work)) for one in lower(site)]
    most = site.limits.max_num_tokens
    assert kinds == [("decode", 4, 2), ("decode", most, 1), ("any", most, 4)]
    few = lower(replace(site, limits=Limits(4, 1024, 4)))
    assert [one.kind for one in few] == ["decode", "any"]


def test_sites_that_are_left_to_other_kernels() -> None:
    case = CASES[0]
    site = site_of(case.call(case.decode()), "tokens", 90)
    assert takes(site)
    assert not takes(replace(site, sm=89)) and not takes(replace(site, sm=100))
    assert not takes(replace(site, axes={**site.axes, "value_dim": 192}))
    assert not takes(replace(site, dtypes={**site.dtypes, "qkv": "f32"}))
