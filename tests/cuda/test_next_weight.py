"""Weights of the next call, which a linear brings to the L2 cache while memory is idle."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.caches import uniform_layout
from tests.support.compiled import compiled
from tests.support.linear_calls import Case, linear_call
from tests.support.lowered import site_of
from tests.support.triton_kernels import needs_triton
from trtc.builder.targets import cuda_lowering
from trtc.builder.targets.gpu.ptx import CompiledKernel
from trtc.protos.launch_plan import CallLaunches, KernelCall
from trtc.protos.manifest import Limits
from trtc.protos.plan import Argument, Buffer, Call, Fill, Plan, Weight

needs_triton()

from tests.support.mixed_input_launch import run_few  # noqa: E402
from trtc.builder.targets.gpu.lowerings import lowerings  # noqa: E402
from trtc.plugins.gemm.mixed_input import few_variants  # noqa: E402
from trtc.plugins.gemm.mixed_input_tactics import Few  # noqa: E402
from trtc.plugins.gpu.lowering import NEXT_WEIGHT  # noqa: E402

LIMITS = Limits(max_batch_size=4, max_seq_len=64, max_num_tokens=64)
KV = uniform_layout(num_layers=1, page_size=8, num_kv_heads=1, head_dim=8, dtype="bf16")
SIZE, GROUPS = 4096, 32
"""Of weights whose tactic for one row fetches the next call's."""
CASE = Case("bf16", "i4", 32, 512, 128, layout="tiles")
FETCHES = Few(1, 1, 2, 2, 2, digits=True, next_share=3)


@pytest.mark.parametrize("num_bytes", [1 << 10, 5 << 14])
def test_a_result_is_the_same_with_it(num_bytes: int) -> None:
    call = linear_call(np.random.default_rng(3), CASE, rows=1)
    site = site_of(call, "tokens", 90)
    fetching = replace(site, next_weight_bytes=num_bytes)
    next_weight = np.zeros(num_bytes, np.uint8)
    found = run_few(call, fetching, FETCHES, lazy=True, beside={NEXT_WEIGHT: next_weight})
    assert found.tobytes() == run_few(call, site, FETCHES, lazy=True).tobytes()


def test_the_instruction_is_there_from_sm_90_on() -> None:
    call = linear_call(np.random.default_rng(3), CASE, rows=1)
    for sm in (89, 90):
        site = replace(site_of(call, "tokens", sm), next_weight_bytes=5 << 14)
        (variant,) = few_variants(site, [FETCHES])
        (kernel,) = compiled(variant, sm)
        assert (b"cp.async.bulk.prefetch.L2" in kernel.ptx) is (sm == 90)


def make_plan() -> Plan:
    """Three linears of the same size, another operator before the last."""
    weights, end = [], 0
    for name in "abc":
        kinds: tuple[tuple[str, Any, int, int], ...] = (
            ("weight", "i4", SIZE, SIZE * SIZE // 2),
            ("weight_scale", "f32", GROUPS, SIZE * GROUPS * 4),
        )
        for kind, dtype, columns, size in kinds:
            shape, fill = (SIZE, columns), Fill(element=dtype)
            weights.append(Weight(f"{name}.{kind}", dtype, shape, "row_major", end, size, fill))
            end += size
    row = 2 * SIZE * LIMITS.max_num_tokens
    buffers = tuple(
        Buffer(name=name, dtype="bf16", rows="T", columns=SIZE, offset=row * number)
        for number, name in enumerate(("x", "y"))
    )
    adds = Call(
        operator="add",
        site="sum",
        arguments=tuple(argument(parameter, "buffer", "x") for parameter in ("x", "y", "out")),
        attributes={},
        axes={"M": "T", "K": SIZE},
    )
    calls = (linear("a", "x", "y"), linear("b", "y", "x"), adds, linear("c", "x", "y"))
    return Plan(
        limits=LIMITS,
        kv=KV,
        vocab_size=8,
        buffers=buffers,
        weights=tuple(weights),
        calls=calls,
        arena_bytes=2 * row,
        weights_bytes=end,
    )


def argument(
    parameter: str, kind: Any, name: str, dtype: Any = "bf16", size: int = SIZE
) -> Argument:
    return Argument(
        parameter=parameter, kind=kind, name=name, dtype=dtype, row_stride=size, columns=size
    )


def linear(name: str, x: str, out: str) -> Call:
    return Call(
        operator="linear",
        site=name,
        arguments=(
            argument("x", "buffer", x),
            argument("weight", "weight", f"{name}.weight", "i4"),
            argument("weight_scale", "weight", f"{name}.weight_scale", "f32", GROUPS),
            argument("out", "buffer", out),
        ),
        attributes={
            "N": SIZE, "group_size": 128, "weight_dtype": "i4", "layout": "tiles",
            "activation": "exact", "softcap": 0.0, "out_dtype": "bf16",
        },
        axes={"M": "T", "K": SIZE, "G": GROUPS},
    )  # fmt: skip


def test_it_is_that_of_the_very_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_compiled(source: Any, sm: int, triton: Any) -> CompiledKernel:
        return CompiledKernel("kernel", source.parameters, 32, 0, sm, "", "", b"", b"")

    monkeypatch.setattr(cuda_lowering, "compile_source", not_compiled)
    plan = make_plan()
    launches = cuda_lowering.write_launches(
        plan, 90, lowerings(), tmp_path, lambda message: None, is_uniform=lambda name: False
    )
    offsets = {weight.name: weight.offset for weight in plan.weights}
    reads = {call.site: weights_read(call) for call in launches.calls if call.site != "sum"}
    assert reads == {
        "a": {offsets["a.weight"], offsets["a.weight_scale"], offsets["b.weight"]},
        "b": {offsets["b.weight"], offsets["b.weight_scale"]},
        "c": {offsets["c.weight"], offsets["c.weight_scale"]},
    }


def weights_read(call: CallLaunches) -> set[int]:
    """Where what the launch for one row is given of the weights begins."""
    (launch,) = call.variants[0].work
    assert call.variants[0].max_rows == 1 and isinstance(launch, KernelCall)
    return {place.offset for place in launch.arguments if place.space == "weights"}
