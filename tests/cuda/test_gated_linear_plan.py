"""A launch plan with a gated_linear: every variant by its resolved addresses, on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.caches import uniform_layout
from tests.support.cuda_engines import in_interpreter, stand_in_for_compiler
from tests.support.gated_calls import gated_call
from tests.support.kernels import KernelCall, assert_close
from tests.support.triton_kernels import needs_triton
from trtc.builder.memory import align
from trtc.builder.targets.cuda_lowering import write_launches
from trtc.protos.dtypes import DTYPES
from trtc.protos.manifest import Limits
from trtc.protos.plan import Argument, Buffer, Call, Fill, Plan, Weight
from trtc.runtime.executors.cuda.buckets import Bucket
from trtc.runtime.executors.cuda.device import HostArray
from trtc.runtime.executors.cuda.program import CudaEngineFiles, Program

needs_triton()

LIMITS = Limits(max_batch_size=6, max_seq_len=64, max_num_tokens=520)
KV = uniform_layout(num_layers=1, page_size=8, num_kv_heads=1, head_dim=8, dtype="f32")
ROWS, WIDTH, DEPTH = 7, 128, 256
BUCKET = Bucket("mixed", tokens=8, sequences=2, rows=2, splits=1)
Results = list[tuple[list[str], Any]]


def make_call(dtype: str) -> KernelCall:
    return gated_call(ROWS, WIDTH, DEPTH, dtype=dtype)


def make_plan(call: KernelCall) -> Plan:
    """x and out beside each other in the arena, all else among the weights."""
    types = call.types | call.output_types
    dtype: Any = types["x"].dtype
    num_bytes = DTYPES[dtype].num_bytes
    x = Buffer(name="x", dtype=dtype, rows="T", columns=DEPTH, offset=0)
    end = align(LIMITS.max_num_tokens * num_bytes(DEPTH))
    out = Buffer(name="out", dtype=dtype, rows="T", columns=WIDTH, offset=end)
    weights, end = [], 0
    for name, tensor in call.types.items():
        if name != "x":
            shape: Any = tensor.shape
            element: Any = tensor.dtype
            size = _bytes(call, name).size
            fill = Fill(element=element)
            weights.append(Weight(name, element, shape, "row_major", end, size, fill))
            end = align(end + size)
    columns = {"x": DEPTH, "weight": DEPTH, "out": WIDTH}
    arguments = tuple(
        Argument(
            parameter=name,
            kind="buffer" if name in ("x", "out") else "weight",
            name=name,
            dtype=tensor.dtype,  # type: ignore[arg-type]
            row_stride=columns.get(name, 1),
            columns=columns.get(name, 1),
        )
        for name, tensor in types.items()
    )
    axes: dict[str, int | str] = {"M": "T", "K": DEPTH, "N": 2 * WIDTH, "G": 1}
    return Plan(
        limits=LIMITS,
        kv=KV,
        vocab_size=8,
        buffers=(x, out),
        weights=tuple(weights),
        calls=(
            Call(
                operator="gated_linear",
                site="mlp.gate_up",
                arguments=arguments,
                attributes=dict(call.attributes),
                axes=axes,
            ),
        ),
        arena_bytes=out.offset + LIMITS.max_num_tokens * num_bytes(WIDTH),
        weights_bytes=end,
    )


def _bytes(call: KernelCall, name: str) -> Any:
    return np.ascontiguousarray(call.inputs[name]).view(np.uint8).reshape(-1)


def run_variants(directory: str, dtype: str) -> Results:
    """(what ran, out of the bucket's rows) of each variant."""
    from tests.support.interpreted_device import InterpretedDevice
    from trtc.builder.targets.gpu.lowerings import lowerings
    from trtc.plugins.gated_linear import cuda
    from trtc.plugins.gemm import streamed_gated
    from trtc.plugins.gemm.streamed import Cut

    cuda._PROGRAMS = 2  # idle ones take their time here
    # The table has products that are too wide to be interpreted.
    streamed_gated._CUTS = {(dtype, "narrow"): (Cut(64, 1, stages=4, x_stages=4),)}
    sources = stand_in_for_compiler()
    call, engine = make_call(dtype), Path(directory)
    plan = make_plan(call)
    launches = write_launches(
        plan, 90, lowerings(), engine, lambda message: None, is_uniform=lambda name: False
    )
    weights = np.zeros(plan.weights_bytes, np.uint8)
    for one in plan.weights:
        data = _bytes(call, one.name)
        weights[one.offset : one.offset + len(data)] = data
    (lowered,) = launches.calls
    found, x = [], _bytes(call, "x")
    for variant in lowered.variants:
        device = InterpretedDevice(sources)
        files = CudaEngineFiles(engine, launches, HostArray(weights))
        program = Program(files, device, kv=KV, vocab_size=8, num_pages=1)
        arena: Any = program.spaces["arena"]
        arena.tensor.numpy()[: len(x)] = x
        step: Any = program.spaces["step"]
        step.tensor.numpy().view(np.int32)[:4] = (ROWS, 1, 1, 0)
        program.run_call(lowered, variant, BUCKET)
        out = arena.tensor.numpy()[plan.buffers[1].offset :]
        found.append((device.launched, out.reshape(LIMITS.max_num_tokens, -1)[:ROWS].copy()))
    return found


SKINNY, STREAMED, LIBRARY = "skinny_linear", "streamed_linear", "product"


@pytest.mark.parametrize(
    ("dtype", "few", "many"),
    [
        ("f8e4m3", [SKINNY, SKINNY, SKINNY], ["gated_linear"]),
        ("bf16", [SKINNY, SKINNY, STREAMED], None),
    ],
)
def test_every_variant_is_the_reference(
    dtype: str, few: list[str], many: list[str] | None, tmp_path: Path
) -> None:
    results = in_interpreter(run_variants, str(tmp_path), dtype)
    two_steps = [[product, "swiglu"] for product in (*few, STREAMED, LIBRARY)]
    two_steps.insert(len(few), [STREAMED])
    assert [ran for ran, _ in results] == [*two_steps, *([many] if many else [])]
    call = make_call(dtype)
    x = call.inputs["x"]
    assert x is not None
    for _, out in results:
        assert_close(call, {"out": out.view(x.dtype)})
