"""A launch plan with a gated_linear: every variant by its resolved addresses, on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.caches import uniform_layout
from tests.support.cuda_engines import stand_in_for_compiler
from tests.support.gated_calls import gated_call
from tests.support.kernels import KernelCall, assert_close
from tests.support.triton_kernels import in_interpreter, needs_triton
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
BUFFERS = ("x", "row_scale", "out", "out_row_scale")
BUCKET = Bucket("mixed", tokens=8, sequences=2, rows=2, splits=1)
Results = list[tuple[list[str], dict[str, Any]]]
"""What ran, and its outputs as bytes."""
BY_ROW = " by row"
"""Ends the kind of a call whose rows have scales."""


def make_call(kind: str) -> KernelCall:
    dtype = kind.removesuffix(BY_ROW)
    return gated_call(ROWS, WIDTH, DEPTH, dtype=dtype, by_row=dtype != kind)


def make_plan(call: KernelCall) -> Plan:
    """What has rows beside each other in the arena, all else among the weights."""
    types = call.types | call.output_types
    columns = {"x": DEPTH, "weight": DEPTH, "out": WIDTH}
    buffers, end = [], 0
    for name in (name for name in BUFFERS if name in types):
        dtype: Any = types[name].dtype
        width = columns.get(name, 1)
        buffers.append(Buffer(name=name, dtype=dtype, rows="T", columns=width, offset=end))
        end = align(end + LIMITS.max_num_tokens * DTYPES[dtype].num_bytes(width))
    arena_bytes = end
    weights, end = [], 0
    for name, tensor in call.types.items():
        if name not in BUFFERS:
            shape: Any = tensor.shape
            element: Any = tensor.dtype
            size = _bytes(call, name).size
            fill = Fill(element=element)
            weights.append(Weight(name, element, shape, "row_major", end, size, fill))
            end = align(end + size)
    arguments = tuple(
        Argument(
            parameter=name,
            kind="buffer" if name in BUFFERS else "weight",
            name=name,
            dtype=tensor.dtype,  # type: ignore[arg-type]
            row_stride=columns.get(name, 1),
            columns=columns.get(name, 1),
        )
        for name, tensor in types.items()
    )
    axes: dict[str, int | str] = {"M": "T", "K": DEPTH, "N": 2 * WIDTH, "G": 1, "scales": 1}
    return Plan(
        limits=LIMITS,
        kv=KV,
        vocab_size=8,
        buffers=tuple(buffers),
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
        arena_bytes=arena_bytes,
        weights_bytes=end,
    )


def _bytes(call: KernelCall, name: str) -> Any:
    return np.ascontiguousarray(call.inputs[name]).view(np.uint8).reshape(-1)


def run_variants(directory: str, kind: str) -> Results:
    """Of each variant, the bucket's rows."""
    from tests.support.interpreted_device import InterpretedDevice
    from trtc.builder.targets.gpu.lowerings import lowerings
    from trtc.plugins.gated_linear import cuda
    from trtc.plugins.gemm import streamed_gated
    from trtc.plugins.gemm.streamed import Cut

    cuda._PROGRAMS = 2  # idle ones take their time here
    # The table has products that are too wide to be interpreted.
    cut = Cut(64, 1, stages=4, x_stages=4)
    streamed_gated._CUTS = {(kind.removesuffix(BY_ROW), "narrow"): (cut,)}
    sources = stand_in_for_compiler()
    call, engine = make_call(kind), Path(directory)
    plan = make_plan(call)
    launches = write_launches(
        plan, 90, lowerings(), engine, lambda message: None, is_uniform=lambda name: False
    )
    weights = np.zeros(plan.weights_bytes, np.uint8)
    for one in plan.weights:
        data = _bytes(call, one.name)
        weights[one.offset : one.offset + len(data)] = data
    (lowered,) = launches.calls
    found = []
    for variant in lowered.variants:
        device = InterpretedDevice(sources)
        files = CudaEngineFiles(engine, launches, HostArray(weights))
        program = Program(files, device, kv=KV, vocab_size=8, num_pages=1)
        arena: Any = program.spaces["arena"]
        memory = arena.tensor.numpy()
        for buffer in plan.buffers:
            if buffer.name in call.inputs:
                data = _bytes(call, buffer.name)
                memory[buffer.offset : buffer.offset + len(data)] = data
        step: Any = program.spaces["step"]
        step.tensor.numpy().view(np.int32)[:4] = (ROWS, 1, 1, 0)
        program.run_call(lowered, variant, BUCKET)
        outputs = {}
        for buffer in plan.buffers:
            size = DTYPES[buffer.dtype].num_bytes(buffer.columns) * ROWS
            if buffer.name not in call.inputs:
                outputs[buffer.name] = memory[buffer.offset : buffer.offset + size].copy()
        found.append((device.launched, outputs))
    return found


SKINNY, STREAMED, LIBRARY = "skinny_linear", "streamed_linear", "product"


@pytest.mark.parametrize(
    ("kind", "few", "many"),
    [
        ("f8e4m3", [SKINNY, SKINNY, SKINNY], ["gated_linear"]),
        ("f8e4m3" + BY_ROW, [SKINNY, SKINNY, SKINNY], ["gated_linear", "quantize_rows"]),
        ("bf16", [SKINNY, SKINNY, STREAMED], None),
    ],
)
def test_every_variant_is_the_reference(
    kind: str, few: list[str], many: list[str] | None, tmp_path: Path
) -> None:
    results = in_interpreter(run_variants, str(tmp_path), kind)
    two_steps = [[product, "swiglu"] for product in (*few, STREAMED, LIBRARY)]
    two_steps.insert(len(few), [STREAMED, *(["quantize_rows"] if kind.endswith(BY_ROW) else [])])
    if not kind.endswith(BY_ROW):
        two_steps[:2] = [[SKINNY], [SKINNY]]
    assert [ran for ran, _ in results] == [*two_steps, *([many] if many else [])]
    call = make_call(kind)
    for _, outputs in results:
        arrays = {
            name: outputs[name].view(one.dtype).reshape(one.shape)
            for name, one in call.reference().items()
        }
        assert_close(call, arrays)
