"""What fused_linear is lowered to: its kernel on the CPU, thread by thread, and its variants."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.fused_calls import Fused, fused_call
from tests.support.kernels import KernelCall, assert_close
from tests.support.triton_kernels import needs_triton
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch, Lower, Site, Variant
from trtc.plugins.gpu.sources import CudaSource
from trtc.protos.manifest import Limits

needs_triton()

from tests.support.compiled import compiled  # noqa: E402
from tests.support.lowered import site_of  # noqa: E402
from tests.support.mixed_input_launch import run_few  # noqa: E402
from trtc.builder.targets.gpu.lowerings import lowerings  # noqa: E402
from trtc.plugins.fused_linear.cuda import fused_site  # noqa: E402
from trtc.plugins.gemm.mixed_input_tactics import Few  # noqa: E402

LOWER: Lower = lowerings()["fused_linear"]
CASES = [
    (Fused(64, 512), Few(1, 1, 2, 2, 2, digits=True)),
    (Fused(48, 768, "u4", bias=True), Few(1, 1, 1, 2, 3, 2, digits=True)),
    (Fused(80, 640, norm_pre_scale=True), Few(1, 1, 2, 1, 2, 2, digits=True)),
    (Fused(32, 256, "u4", group=64), Few(1, 1, 1, 2, 3)),
    (Fused(128, 512, norm=False, gate="silu"), Few(1, 1, 4, 2, 3, digits=True)),
    (Fused(160, 384, norm=False, gate="gelu_tanh", bias=True), Few(2, 1, 4, 1, 2, digits=True)),
    (Fused(96, 512, "u4", norm=False, gate="silu", gate_pre_scale=True), Few(8, 1, 2, 2, 3)),
    (
        Fused(128, 512, gate="silu", gate_pre_scale=True),
        Few(1, 2, 2, 1, 3, 1, digits=True, early=1),
    ),
    (Fused(96, 640, "u4", gate="gelu_tanh", norm_pre_scale=True), Few(1, 1, 4, 1, 3)),
    (Fused(64, 512, "iq4", group=32, bias=True), Few(1, 1, 2, 2, 2)),
    (Fused(96, 512, "iq4", group=32, gate="silu", gate_pre_scale=True), Few(1, 1, 4, 1, 3)),
    (Fused(64, 512, "f4e2m1", group=32, bias=True), Few(1, 1, 2, 2, 2)),
    (Fused(96, 512, "f4e2m1", group=32, gate="silu"), Few(1, 1, 4, 1, 3)),
]


def run(call: KernelCall, few: Few, *, lazy: bool = True) -> Any:
    return run_few(call, fused_site(site_of(call, "tokens", 90)), few, lazy=lazy)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("case", "few"), CASES, ids=str)
def test_the_kernel_agrees_with_the_reference(case: Fused, few: Few, lazy: bool) -> None:
    call = fused_call(np.random.default_rng(5), case, rows=few.rows)
    assert_close(call, {"out": run(call, few, lazy=lazy)})


def test_the_squares_are_summed_the_same_however_the_weight_is_cut() -> None:
    """Rows of the weight by themselves, in blocks of which each has a part of K or all of it."""
    case = Fused(64, 512)
    call = fused_call(np.random.default_rng(6), case)
    one, two = (run(call, Few(1, 1, 2, 2, 3, cluster, digits=True)) for cluster in (1, 2))
    assert_close(call, {"out": one})
    assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("size", [1e-30, 1e15])
def test_rows_of_any_size_are_normalised(size: float) -> None:
    """Where eps is all there is, and where the squares are near the largest number."""
    case, few = CASES[0]
    call = fused_call(np.random.default_rng(7), case)
    x = call.inputs["x"]
    assert x is not None
    scaled = (x.astype(np.float32) * size).astype(x.dtype)
    call = replace(call, inputs={**call.inputs, "x": scaled})
    assert_close(call, {"out": run(call, few)})


def test_what_is_not_a_number_stays_one() -> None:
    case, few = CASES[7]
    call = fused_call(np.random.default_rng(8), case)
    x = call.inputs["x"]
    assert x is not None
    x[0, 130] = np.nan
    assert np.isnan(run(call, few).astype(np.float32)).all()


def make_site(case: Fused, sm: int = 90, most_rows: int = 4096) -> Site:
    call = fused_call(np.random.default_rng(0), case, rows=3)
    return replace(site_of(call, "tokens", sm), limits=Limits(64, 1024, most_rows))


def entries(variant: Variant) -> list[str]:
    return [
        (one.kernel.entry if isinstance(one.kernel, CudaSource) else one.kernel.function.__name__)
        if isinstance(one, Launch)
        else "product"
        for one in variant.work
    ]


BOTH = Fused(256, 384, gate="silu", norm_pre_scale=True, gate_pre_scale=True)


def test_one_row_is_one_launch_and_more_are_three_steps() -> None:
    one, *more = LOWER(make_site(BOTH))
    assert entries(one) == ["mixed_input_gemm"] and one.max_rows == 1 and not one.scratch
    assert [variant.max_rows for variant in more] == [8, 16, 32, 64, 128, 256, 4096]
    for variant in more:
        assert entries(variant)[0] == "rms_norm" and entries(variant)[-1] == "swiglu"
        norm, *_, gate = variant.work
        assert isinstance(norm, Launch) and isinstance(gate, Launch)
        assert set(norm.arguments) == {
            "x", "norm_weight", "norm_pre_scale", "dims", "scratch.normed",
        }  # fmt: skip
        assert set(gate.arguments) == {
            "scratch.product", "scratch.up", "gate_pre_scale", "dims", "out",
        }  # fmt: skip
        wide = {"wide_weight": 2 * 256 * 384} if variant is more[-1] else {}
        rows = variant.max_rows
        assert variant.scratch == {"normed": rows * 384 * 2, "product": rows * 256 * 2, **wide}
        assert variant.views == {"up": ("product", 128 * 2)}


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (Fused(256, 384), ["rms_norm", "mixed_input_gemm"]),
        (Fused(256, 384, norm=False, gate="silu"), ["mixed_input_gemm", "swiglu"]),
    ],
    ids=str,
)
def test_steps_are_those_there_are(case: Fused, steps: list[str]) -> None:
    one, some, *_ = LOWER(make_site(case))
    assert entries(one) == ["mixed_input_gemm"]
    assert entries(some) == steps


@pytest.mark.parametrize(
    "case",
    [Fused(48, 256, gate="silu"), Fused(32, 1 << 16), Fused(16, 1 << 14)],
    ids=["gate and up share a tile", "x is too large", "squares of many for a thread"],
)
def test_steps_for_all_rows(case: Fused) -> None:
    variants = LOWER(make_site(case))
    assert all(len(variant.work) > 1 for variant in variants)
    assert variants[-1].max_rows == 4096


GATED = Fused(28672, 4096, gate="silu")
GATED_IQ4 = Fused(28672, 4096, "iq4", group=32, gate="silu")


@pytest.mark.parametrize(
    ("case", "sm"),
    [(GATED_IQ4, sm) for sm in ARCHS]
    + [(GATED, sm) for sm in (86, 90)]
    + [(Fused(6144, 4096, norm_pre_scale=True), 90)],
    ids=str,
)
def test_the_kernel_compiles(case: Fused, sm: int) -> None:
    """With norm and gate and the words that take longest to widen on every SM; other words with
    little shared memory and with much; a norm without a gate."""
    (one, *_) = LOWER(make_site(case, sm))
    (kernel,) = compiled(one, sm)
    assert kernel.entry == "mixed_input_gemm" and b"mma" in kernel.ptx
