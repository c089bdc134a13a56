"""Launches that run beside the one before them: which do, and what their kernels wait for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.caches import uniform_layout
from tests.support.compiled import compile_sources
from tests.support.engines import config_dict
from tests.support.evaluate import LIMITS, PAGE_SIZE
from tests.support.linear_calls import Case, linear_call
from tests.support.triton_kernels import needs_triton
from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.families.registry import decoder_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.order import cuda_passes
from trtc.builder.plan import make_plan
from trtc.plugins.gemm.streamed import Cut, streamed_launch
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.registry import REGISTRY
from trtc.protos.plan import Argument, Buffer, Call, Plan
from trtc.quant.scheme import SCHEMES

needs_triton()

from tests.support.lowered import site_of  # noqa: E402
from trtc.builder.targets.cuda_concurrency import overlap_calls  # noqa: E402
from trtc.builder.targets.cuda_lowering import Source, lower_calls, source_key  # noqa: E402
from trtc.builder.targets.gpu.lowerings import lowerings  # noqa: E402
from trtc.plugins.gpu.concurrent import releasing_late, waiting_last  # noqa: E402
from trtc.plugins.gpu.lowering import (  # noqa: E402
    ONE,
    SCRATCH,
    Collective,
    Gemm,
    Launch,
    Variant,
)

ROWS = 8
KV = uniform_layout(num_layers=1, page_size=8, num_kv_heads=1, head_dim=8, dtype="bf16")


def plan_of(family: str) -> Plan:
    spec = decoder_spec(config_dict(family), LIMITS.max_seq_len)
    scheme = SCHEMES["bf16"]
    reader, quantization = dummy_checkpoint(spec, scheme)
    request = GraphRequest(scheme, scheme.dtype, LIMITS, quantization, PAGE_SIZE)
    module, _ = run_passes(build_graph(spec, request, reader), cuda_passes(scheme, reader))
    return make_plan(module, REGISTRY, max_logit_rows=LIMITS.max_batch_size)


def is_last(constants: Mapping[str, object]) -> bool:
    """Whether a kernel waits only at its end."""
    return constants.get("WAITS_LAST") == 1 or constants.get("OVERLAPS") == 3


def waits_last(work: Sequence[object]) -> bool:
    """Whether the first launch of a variant does."""
    return bool(work) and isinstance(work[0], Launch) and is_last(work[0].kernel.constants)


def releases_late(work: Sequence[object]) -> bool:
    """Whether the last launch of a variant lets the next start only when its wait is over."""
    last = work[-1]
    constants = last.kernel.constants if isinstance(last, Launch) else {}
    return constants.get("RELEASES_LATE") == 1 or constants.get("OVERLAPS") == 2


@pytest.mark.parametrize(
    ("family", "beside"),
    [
        ("llama", set()),
        ("deepseek_v2", {"mlp.shared.gate_up", "mlp.moe"}),
        ("qwen3_5_moe", {"delta.a", "mlp.shared.gate_up", "mlp.shared_gate", "mlp.moe"}),
    ],
)
def test_shared_experts_and_decays_run_beside_routers_and_convolutions(
    family: str, beside: set[str]
) -> None:
    plan = plan_of(family)
    lowered = lower_calls(plan, 90, lowerings())
    variants = [one.variants for one in lowered]
    followers = [
        number
        for number, call in enumerate(variants)
        if any(waits_last(variant.work) for variant in call)
    ]
    names = {plan.calls[number].site.split(".", 2)[-1] for number in followers}
    assert names == beside
    for number in followers:
        assert number - 1 not in followers
        assert all(
            releases_late(variant.work) or isinstance(variant.work[-1], Gemm)
            for variant in variants[number - 1]
        )


def sources_of(family: str) -> list[Source]:
    """Kernels of launches that run side by side, each once."""
    found = {}
    for one in lower_calls(plan_of(family), 90, lowerings()):
        for variant in one.variants:
            for work in variant.work:
                if isinstance(work, Launch) and (waits_last([work]) or releases_late([work])):
                    found[source_key(work.kernel)] = work.kernel
    return list(found.values())


def streamed() -> list[Source]:
    """The same kernel in both places."""
    case = Case("bf16", "bf16", 208, 264, out="f32", layout="row_major")
    site = site_of(linear_call(np.random.default_rng(2), case, rows=3), "tokens", 90)
    launch = streamed_launch(replace(site, strides={**site.strides, "out": 224}), Cut(16, 1, 2, 2))
    return [releasing_late(launch).kernel, waiting_last(launch).kernel]


def test_kernels_wait_and_let_start_where_they_should() -> None:
    """In a pair the first lets the second start when its own wait is over, and the second waits
    when it has loaded and stored all that it does."""
    sources = [*sources_of("qwen3_5_moe"), *streamed()]
    entries = set()
    for source, kernel in zip(sources, compile_sources(sources, 90), strict=True):
        ptx = kernel.ptx.decode()
        before, *waits, after = ptx[ptx.index(".entry") :].split("griddepcontrol.wait")
        if is_last(source.constants):
            assert not waits and not re.search(r"\b(st|ld|red|atom)\.", after), kernel.entry
        else:
            assert "griddepcontrol.launch_dependents" not in before
            assert not re.search(r"\b(st|red|atom)\.global", before), kernel.entry
            assert "griddepcontrol.launch_dependents" in after
        entries.add((kernel.entry, is_last(source.constants)))
    both = {
        (entry, last) for entry in ("skinny_linear", "streamed_linear") for last in (True, False)
    }
    assert entries == both | {
        ("route", True),
        ("convolution_decode", False),
        ("convolution", False),
    }


def test_nothing_does_where_launches_do_not_overlap() -> None:
    works = [
        [work]
        for one in lower_calls(plan_of("deepseek_v2"), 89, lowerings())
        for variant in one.variants
        for work in variant.work
    ]
    assert works and not any(waits_last(work) or releases_late(work) for work in works)


SPANS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3)), min_size=4, max_size=4)
"""Where x and out of two linears lie, in units of a cache line, and their sizes."""
LAUNCH = Launch(
    CudaSource("", "", (), {}, num_threads=32, shared_bytes=0),
    ("x", "weight", "dims", "out"),
    (ONE, ONE, ONE),
    overlaps=True,
    may_wait_last=True,
)
ALONE = Variant(work=(LAUNCH,), max_rows=ROWS)


def two_linears(spans: Sequence[tuple[int, int]]) -> Plan:
    names = ("x0", "out0", "x1", "out1")
    buffers = tuple(
        Buffer(name=name, dtype="bf16", rows="1", columns=32 * size, offset=64 * begin)
        for name, (begin, size) in zip(names, spans, strict=True)
    )
    calls = tuple(
        Call(
            operator="linear",
            site=f"{number}",
            arguments=(
                Argument(parameter="x", kind="buffer", name=f"x{number}", dtype="bf16"),
                Argument(parameter="weight", kind="weight", name="weight", dtype="bf16"),
                Argument(parameter="out", kind="buffer", name=f"out{number}", dtype="bf16"),
            ),
            attributes={},
            axes={"M": "T"},
        )
        for number in range(2)
    )
    return Plan(
        limits=LIMITS, kv=KV, vocab_size=8, buffers=buffers, weights=(), calls=calls,
        arena_bytes=64 * 16, weights_bytes=0,
    )  # fmt: skip


@given(SPANS)
def test_calls_that_share_what_either_writes_follow_each_other(
    spans: list[tuple[int, int]],
) -> None:
    x0, out0, x1, out1 = (set(range(begin, begin + size)) for begin, size in spans)
    depends = bool(out0 & x1 or out0 & out1 or x0 & out1)
    first, second = overlap_calls(two_linears(spans), REGISTRY, [(ALONE,), (ALONE,)])
    assert waits_last(second[0].work) is not depends
    assert releases_late(first[0].work) is not depends
    assert (first == (ALONE,)) is (second == (ALONE,)) is depends


APART = [(0, 1), (1, 1), (2, 1), (3, 1)]
SCRATCHED = replace(LAUNCH, arguments=("x", "weight", SCRATCH + "some", "out"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ALONE, Variant(work=(replace(LAUNCH, may_wait_last=False),), max_rows=ROWS)),
        (ALONE, Variant(work=(Gemm(),), max_rows=ROWS)),
        (ALONE, Variant(work=(), max_rows=ROWS)),
        (Variant(work=(), max_rows=ROWS), ALONE),
        (Variant(work=(Collective("all_reduce", "x", "out"),), max_rows=ROWS), ALONE),
        (Variant(work=(replace(LAUNCH, least_splits=2),), max_rows=ROWS), ALONE),
        (
            Variant(work=(SCRATCHED,), max_rows=ROWS, scratch={"some": 64}),
            Variant(work=(SCRATCHED,), max_rows=ROWS, scratch={"some": 64}),
        ),
    ],
    ids=["kernel", "library", "nothing", "after nothing", "collective", "left out", "scratch"],
)
def test_these_wait_for_the_call_before_them(first: Variant, second: Variant) -> None:
    found = overlap_calls(two_linears(APART), REGISTRY, [(first, ALONE), (second,)])
    assert found == [(first, ALONE), (second,)]


def test_a_call_after_two_that_run_side_by_side_waits() -> None:
    """The third does not know that the first is done until the second is."""
    plan = two_linears(APART)
    third = replace_buffers(plan.calls[0], "x2", "out2")
    buffers = (
        *plan.buffers,
        Buffer(name="x2", dtype="bf16", rows="1", columns=32, offset=4 * 64),
        Buffer(name="out2", dtype="bf16", rows="1", columns=32, offset=5 * 64),
    )
    three = msgspec.structs.replace(plan, calls=(*plan.calls, third), buffers=buffers)
    _, second, last = overlap_calls(three, REGISTRY, [(ALONE,)] * 3)
    assert waits_last(second[0].work) and last == (ALONE,)


def replace_buffers(call: Call, x: str, out: str) -> Call:
    names = {"x": x, "out": out}
    return msgspec.structs.replace(
        call,
        arguments=tuple(
            msgspec.structs.replace(one, name=names.get(one.parameter, one.name))
            for one in call.arguments
        ),
    )
