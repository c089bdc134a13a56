"""CUDA engines in tests: lowered without compiling, run by Triton's interpreter on the CPU."""

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx

from tests.support.engines import NUM_PAGES, LivelyReader, config_dict
from tests.support.evaluate import LIMITS, PAGE_SIZE
from tests.support.triton_kernels import set_interpreted
from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.evaluator import Evaluator
from trtc.builder.families.registry import decoder_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.targets.base import CompileRequest
from trtc.protos.launches import LaunchPlan, read_launches
from trtc.protos.manifest import GRAPH_FILE, KvGeometry
from trtc.quant.scheme import Scheme
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.executors.cuda.program import CudaEngineFiles
from trtc.runtime.executors.weights import map_weights

Answer = TypeVar("Answer")


def in_interpreter(work: Callable[..., Answer], *arguments: Any) -> Answer:
    """Call `work` (a module's function) in a process where Triton interprets its kernels."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=set_interpreted) as pool:
        return pool.submit(work, *arguments).result()


@dataclass(frozen=True)
class Lowered:
    """A model without a checkpoint, lowered for a GPU, beside its graph for the evaluator."""

    executor: CudaExecutor
    evaluator: Evaluator
    kv: KvGeometry
    launches: LaunchPlan
    launched: list[str]
    """Kernels and products in the order they ran."""


def lower_dummy(
    family: str,
    scheme: Scheme,
    directory: Path,
    *,
    kv_dtype: str | None = None,
    sm: int = 90,
    **overrides: Any,
) -> Lowered:
    """Lower a tiny model with random canonical tensors and open it on an interpreting device.

    Call it inside `in_interpreter`.
    """
    from tests.support.interpreted_device import InterpretedDevice
    from trtc.builder.targets.cuda import CudaTarget
    from trtc.protos.manifest import WEIGHTS_FILE

    spec = decoder_spec(config_dict(family, **overrides), LIMITS.max_seq_len)
    dummy, quantization = dummy_checkpoint(spec, scheme)
    reader = LivelyReader(dummy, scheme)
    graph = GraphRequest(scheme, kv_dtype or scheme.dtype, LIMITS, quantization, PAGE_SIZE)
    engine, scratch = directory / "engine", directory / "scratch"
    engine.mkdir(parents=True)
    scratch.mkdir()
    request = CompileRequest(
        module=build_graph(spec, graph, reader),
        reader=reader,
        scheme=scheme,
        limits=LIMITS,
        exact_activations=True,
        dummy_weights=False,
        workdir=engine,
        scratch=scratch,
    )
    sources = stand_in_for_compiler()
    target = CudaTarget(sm)
    module, _ = run_passes(request.module, target.passes(request))
    compiled = target.compile(replace(request, module=module), lambda message: None)
    launches = interpretable(read_launches(engine), engine, sources)
    shipped = Module(onnx.load(str(engine / GRAPH_FILE)), {}, module.kv, LIMITS)
    device = InterpretedDevice(sources)
    executor = CudaExecutor(
        CudaEngineFiles(
            engine, launches, map_weights(engine / WEIGHTS_FILE, compiled.ledger.weights)
        ),
        device,
        limits=LIMITS,
        kv=module.kv,
        vocab_size=spec.vocab_size,
        num_pages=NUM_PAGES,
    )
    return Lowered(executor, Evaluator(shipped, reader), module.kv, launches, device.launched)


def stand_in_for_compiler() -> dict[str, Any]:
    """Let this process write keys of sources in place of cubins; fills what it returns with the
    sources by their keys."""
    from trtc.builder.targets import cuda_lowering
    from trtc.plugins.cuda.compile import CompiledKernel

    sources: dict[str, Any] = {}

    def stand_in(source: Any, sm: int) -> CompiledKernel:
        key = cuda_lowering.source_key(source)
        sources[key] = source
        name = source.function.fn.__name__ if hasattr(source, "function") else source.entry
        return CompiledKernel(name, source.parameters, 32, 0, sm, "", "", b"", key.encode())

    cuda_lowering.compile_source = stand_in
    return sources


def interpretable(launches: LaunchPlan, engine: Path, sources: Mapping[str, Any]) -> LaunchPlan:
    """Without the variants that have CUDA C++ in them, which no interpreter runs."""
    import msgspec

    from trtc.plugins.cuda.cpp import CudaSource
    from trtc.protos.launches import KernelCall

    native = {
        number
        for number, code in enumerate(launches.kernels)
        if isinstance(sources[(engine / code.file).read_text()], CudaSource)
    }
    calls = []
    for call in launches.calls:
        variants = tuple(
            variant
            for variant in call.variants
            if not any(isinstance(one, KernelCall) and one.kernel in native for one in variant.work)
        )
        assert variants and variants[-1].kind == "any", f"{call.site} needs CUDA C++"
        calls.append(msgspec.structs.replace(call, variants=variants))
    return msgspec.structs.replace(launches, calls=tuple(calls))


def largest_difference(found: Any, expected: Any) -> float:
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max())
