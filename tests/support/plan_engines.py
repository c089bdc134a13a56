"""Engines of plans over the fake TensorRT and the fake GPU: built, compiled and opened for real."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.compiled import compile_once
from tests.support.engines import config_dict, dummy_request
from tests.support.evaluate import LIMITS, PAGE_SIZE
from tests.support.fake_gpu import CubinKernel, FakeGpu
from tests.support.fake_tensorrt import fake_plugin_module, fake_tensorrt
from tests.support.manifests import tiny_manifest
from tests.support.triton_kernels import Launch, interpret
from trtc.builder.families.registry import decoder_spec
from trtc.builder.module import Module
from trtc.builder.package import seal
from trtc.builder.passes.base import run_passes
from trtc.builder.pipeline import build
from trtc.builder.recipes import TensorReader
from trtc.builder.request import BuildRequest
from trtc.builder.targets.tensorrt import compile as tensorrt_compile
from trtc.builder.targets.tensorrt import kernels as tensorrt_kernels
from trtc.builder.targets.tensorrt import rtx as tensorrt_rtx
from trtc.plugins.registry import REGISTRY
from trtc.protos.stages import read_stages
from trtc.quant.hashing import file_facts
from trtc.quant.scheme import SCHEMES
from trtc.runtime.executors import tensorrt_opening

RTX_VERSION = "1.7.1.116"
VERSION = "11.4.0.106"
SM = 89


@dataclass(frozen=True)
class Machine:
    """Both fake libraries over one fake GPU."""

    trt: Any
    rtx: Any
    gpu: FakeGpu


@contextmanager
def fake_machine(
    monkeypatch: pytest.MonkeyPatch,
    engine: Path | None = None,
    *,
    version: str = VERSION,
    rtx_version: str = RTX_VERSION,
    sm: int = SM,
) -> Iterator[Machine]:
    """A machine with a GPU, TensorRT and TensorRT for RTX, for the builder and for session.py.

    Builds on it compile each kernel once: this GPU runs none of them.

    Args:
        engine: of TensorRT for RTX, whose kernels the GPU is to know.
    """
    gpu = FakeGpu(cubins(engine) if engine is not None else {})
    machine = Machine(
        fake_tensorrt(version, gpu), fake_tensorrt(rtx_version, gpu, is_rtx=True), gpu
    )
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", machine.trt)
        patch.setitem(sys.modules, "tensorrt.plugin", fake_plugin_module(machine.trt))
        patch.setitem(sys.modules, "tensorrt_rtx", machine.rtx)
        patch.setattr(tensorrt_kernels, "compile_kernels", compile_once)
        for module in (tensorrt_compile, tensorrt_opening, tensorrt_rtx):
            patch.setattr(module, "device_sm", lambda: sm)
        patch.setattr(tensorrt_opening, "open_device", gpu.opened)
        yield machine


def build_plans(
    model: Path,
    output: Path,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str = "tensorrt",
    **options: Any,
) -> Path:
    """An engine of the fake library's plans, for sm_89; a bundle is compiled as well.

    Args:
        kind: tensorrt or tensorrt-rtx.
    """
    with fake_machine(monkeypatch):
        return build(request(model, output, dtype, target=f"{kind}:sm_{SM}", **options)).path


def compile_dummy_rtx(
    family: str, scheme: str, kv_dtype: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Module, TensorReader]:
    """An engine of a quantised model without calibration, and the graph that it was cut from."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    target = tensorrt_rtx.TensorRtRtxTarget((SM,))
    compile_request = dummy_request(
        family,
        SCHEMES[scheme],
        directory,
        kv_dtype,
        exact_activations=False,
        window_groups=target.window_groups,
        **sizes,
    )
    module, _ = run_passes(compile_request.module, target.passes(compile_request))
    with fake_machine(monkeypatch):
        made = target.compile(replace(compile_request, module=module), lambda message: None)
    spec = decoder_spec(config_dict(family, **sizes), LIMITS.max_seq_len)
    model = msgspec.structs.replace(tiny_manifest().model, vocab_size=spec.vocab_size)
    manifest = tiny_manifest(
        model=model, target=made.facts, kv=made.kv, ledger=made.ledger, limits=LIMITS
    )
    seal(compile_request.workdir, manifest)
    return compile_request.workdir, module, compile_request.reader


def request(model: Path, output: Path, dtype: str, **options: Any) -> BuildRequest:
    """With the limits of tests/support/evaluate.py."""
    fields = {
        "max_batch_size": LIMITS.max_batch_size,
        "max_seq_len": LIMITS.max_seq_len,
        "max_num_tokens": LIMITS.max_num_tokens,
        "page_size": PAGE_SIZE,
        **options,
    }
    return BuildRequest(model=str(model), output=output, dtype=dtype, **fields)


def run_interpreted(
    kernel: CubinKernel, arrays: dict[str, Any], grid: tuple[int, int]
) -> dict[str, Any]:
    """For FakeGpu.run_kernel: the Triton kernel itself in place of its reference."""
    facts = kernel.facts
    is_write = facts.op == "kv_write"
    launch = Launch(
        module="kv_write.tensorrt_kernel" if is_write else f"{facts.op}.tensorrt_kernel",
        arguments=(
            facts.dtypes,
            dict(facts.attributes),
            kernel.page_size,
            *([] if is_write else [facts.tactic]),
        ),
        grid=(*grid, 1),
        arrays=arrays,
    )
    written = interpret(launch)
    return {output.name: written[output.name] for output in REGISTRY[facts.op].outputs}


def cubins(engine: Path) -> dict[str, CubinKernel]:
    """What the kernels of an engine are, by the SHA-256 of their code."""
    stages = read_stages(engine)
    return {
        file_facts(engine / facts.cubin).sha256: CubinKernel(facts, stages.pool.page_size)
        for kernels in stages.kernels.values()
        for facts in kernels
    }
