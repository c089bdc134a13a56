"""A launch plan with a gated_linear: every variant by its resolved addresses, on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cuda_engines import in_interpreter, stand_in_for_compiler
from tests.support.kernels import KernelCall, assert_close
from tests.support.operands import random_array, scalar
from tests.support.triton_kernels import needs_triton
from tests.support.weights import random_scales, random_weight
from trtc.builder.memory import align
from trtc.builder.targets.cuda_lowering import write_launches
from trtc.plugins.gated_linear.op import GATED_LINEAR
from trtc.protos.manifest import KvGeometry, Limits
from trtc.protos.plan import Argument, Buffer, Call, Fill, Plan, Weight
from trtc.runtime.executors.cuda.buckets import Bucket
from trtc.runtime.executors.cuda.program import CudaEngineFiles, Program

needs_triton()

LIMITS = Limits(max_batch_size=6, max_seq_len=64, max_num_tokens=520)
KV = KvGeometry(num_layers=1, page_size=8, num_kv_heads=1, head_dim=8, dtype="f32")
ROWS, WIDTH, DEPTH = 7, 128, 256
BUCKET = Bucket("mixed", tokens=8, sequences=2, rows=2, splits=1)
ATTRIBUTES: dict[str, int | float | str] = {
    "I": WIDTH,
    "weight_dtype": "f8e4m3",
    "activation": "silu",
}


def make_call() -> KernelCall:
    rng = np.random.default_rng(4)
    scales = random_scales(rng, 2 * WIDTH, depth=DEPTH, group=0, dtype="f8e4m3", x_dtype="f8e4m3")
    inputs = {
        "x": random_array(rng, ROWS, DEPTH, dtype="f8e4m3"),
        "weight": random_weight(rng, 2 * WIDTH, DEPTH, dtype="f8e4m3"),
        "weight_scale": scales,
        "input_scale": scalar(1.5),
        "out_scale": scalar(0.0625),
    }
    return KernelCall(GATED_LINEAR, ATTRIBUTES, inputs)


def make_plan(call: KernelCall) -> Plan:
    """x and out beside each other in the arena, all else among the weights."""
    x = Buffer(name="x", dtype="f8e4m3", rows="T", columns=DEPTH, offset=0)
    end = align(LIMITS.max_num_tokens * DEPTH)
    out = Buffer(name="out", dtype="f8e4m3", rows="T", columns=WIDTH, offset=end)
    weights, end = [], 0
    for name, tensor in call.types.items():
        if name != "x":
            shape: Any = tensor.shape
            dtype: Any = tensor.dtype
            size = _bytes(call, name).size
            fill = Fill(element=dtype)
            weights.append(Weight(name, dtype, shape, "row_major", end, size, fill))
            end = align(end + size)
    arguments = tuple(
        Argument(
            parameter=name,
            kind="buffer" if name in ("x", "out") else "weight",
            name=name,
            dtype="f8e4m3" if name in ("x", "weight", "out") else "f32",
            row_stride=columns,
            columns=columns,
        )
        for name, columns in {
            "x": DEPTH,
            "weight": DEPTH,
            "weight_scale": 1,
            "input_scale": 1,
            "out_scale": 1,
            "out": WIDTH,
        }.items()
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
                attributes=ATTRIBUTES,
                axes=axes,
            ),
        ),
        arena_bytes=out.offset + LIMITS.max_num_tokens * WIDTH,
        weights_bytes=end,
    )


def _bytes(call: KernelCall, name: str) -> Any:
    return np.ascontiguousarray(call.inputs[name]).view(np.uint8).reshape(-1)


def run_variants(directory: str) -> list[tuple[list[str], Any]]:
    """(what ran, out of the bucket's rows) of each variant."""
    from tests.support.interpreted_device import InterpretedDevice
    from trtc.plugins.cuda.lowerings import lowerings
    from trtc.plugins.gated_linear import cuda

    cuda._PROGRAMS = 2  # idle ones take their time here
    sources = stand_in_for_compiler()
    call, engine = make_call(), Path(directory)
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
        files = CudaEngineFiles(engine, launches, weights)
        program = Program(files, device, kv=KV, vocab_size=8, num_pages=1)
        arena: Any = program.spaces["arena"]
        arena.tensor.numpy()[: ROWS * DEPTH] = _bytes(call, "x")
        step: Any = program.spaces["step"]
        step.tensor.numpy().view(np.int32)[:4] = (ROWS, 1, 1, 0)
        program.run_call(lowered, variant, BUCKET)
        begin = plan.buffers[1].offset
        out = arena.tensor.numpy()[begin : begin + BUCKET.tokens * WIDTH]
        found.append((device.launched, out.reshape(BUCKET.tokens, WIDTH).copy()))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], Any]]:
    return in_interpreter(run_variants, str(tmp_path_factory.mktemp("plan")))


def test_every_variant_is_the_reference(results: list[tuple[list[str], Any]]) -> None:
    products = [*["skinny_linear"] * 4, "streamed_linear", "product"]
    two_steps = [[product, "swiglu"] for product in products]
    assert [ran for ran, _ in results] == [*two_steps, ["gated_linear"]]
    call = make_call()
    x = call.inputs["x"]
    assert x is not None
    for _, out in results:
        assert_close(call, {"out": out[:ROWS].view(x.dtype)})
