"""CUDA engines in tests: lowered without compiling, run by Triton's interpreter on the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.support.engines import NUM_PAGES, dummy_request
from tests.support.evaluate import LIMITS
from tests.support.ranks import Meeting
from trtc.builder.evaluator import Evaluator, Exchange, alone
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.order import cuda_passes
from trtc.builder.recipes import TensorReader
from trtc.builder.targets.base import Compiled
from trtc.protos.kv import CacheLayout
from trtc.protos.launch_plan import LaunchPlan, read_launches
from trtc.protos.manifest import GRAPH_FILE, PLAN_FILE, weights_files
from trtc.protos.plan import read_plan
from trtc.quant.scheme import Scheme
from trtc.runtime.executors.cuda.device import HostArray
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.executors.cuda.program import CudaEngineFiles
from trtc.runtime.executors.weights import map_weights


@dataclass(frozen=True)
class Lowered:
    """A model without a checkpoint, lowered for a GPU, beside its graph for the evaluator."""

    executor: CudaExecutor
    evaluator: Evaluator
    kv: CacheLayout
    launches: LaunchPlan
    launched: list[str]
    """Kernels and products in the order they ran."""


@dataclass(frozen=True)
class LoweredRanks:
    """The same of a model that is sharded over ranks, beside the graph of the whole."""

    executors: tuple[CudaExecutor, ...]
    evaluator: Evaluator
    kv: CacheLayout
    """Of the whole model."""
    launched: tuple[list[str], ...]
    """By each rank."""


@dataclass(frozen=True)
class _Engine:
    """An engine's directory, and what it was made from."""

    path: Path
    launches: LaunchPlan
    compiled: Compiled
    vocab_size: int
    sources: Mapping[str, Any]
    source: Module
    reader: TensorReader

    def open(self, rank: int, exchange: Exchange) -> tuple[CudaExecutor, list[str]]:
        """A rank on an interpreting device, and where that writes down what it runs."""
        from tests.support.interpreted_device import InterpretedDevice

        device = InterpretedDevice(self.sources, exchange=exchange)
        weights = self.path / weights_files(self.compiled.facts.tp)[rank]
        executor = CudaExecutor(
            CudaEngineFiles(
                self.path,
                self.launches,
                HostArray(map_weights(weights, self.compiled.ledger.weights)),
            ),
            device,
            limits=LIMITS,
            kv=self.compiled.kv,
            vocab_size=self.vocab_size,
            num_pages=NUM_PAGES,
        )
        return executor, device.launched


def lower_dummy(
    family: str,
    scheme: Scheme,
    directory: Path,
    *,
    kv_dtype: str | None = None,
    sm: int = 90,
    native: bool = False,
    **overrides: Any,
) -> Lowered:
    """Lower a tiny model with random canonical tensors and open it on an interpreting device.

    Call it inside `in_interpreter`. `native`: kernels in CUDA C++ run too, thread by thread;
    otherwise their calls take another variant.
    """
    engine = _lower(family, scheme, directory, kv_dtype, sm, 1, overrides, native=native)
    executor, launched = engine.open(0, alone)
    shipped = Module(onnx.load(str(engine.path / GRAPH_FILE)), {}, engine.compiled.kv, LIMITS)
    evaluator = Evaluator(shipped, engine.reader)
    return Lowered(executor, evaluator, engine.compiled.kv, engine.launches, launched)


def lower_ranks(
    family: str, scheme: Scheme, directory: Path, ranks: int, *, ep: bool = False, **overrides: Any
) -> LoweredRanks:
    """The same with --tp, and --ep; the ranks meet in threads."""
    engine = _lower(family, scheme, directory, None, 90, ranks, overrides, ep=ep)
    meeting = Meeting(ranks)
    opened = [engine.open(rank, meeting.exchange_of(rank)) for rank in range(ranks)]
    whole, _ = run_passes(engine.source, cuda_passes(scheme, engine.reader))
    executors, launched = zip(*opened, strict=True)
    return LoweredRanks(executors, Evaluator(whole, engine.reader), whole.kv, launched)


def _lower(
    family: str,
    scheme: Scheme,
    directory: Path,
    kv_dtype: str | None,
    sm: int,
    ranks: int,
    overrides: Mapping[str, Any],
    *,
    native: bool = False,
    ep: bool = False,
) -> _Engine:
    from trtc.builder.targets.cuda import CudaTarget

    target = CudaTarget(sm)
    request = dummy_request(
        family,
        scheme,
        directory,
        kv_dtype,
        exact_activations=True,
        window_groups=target.window_groups,
        ranks=ranks,
        ep=ep,
        **overrides,
    )
    path = request.workdir
    sources = stand_in_for_compiler()
    module, _ = run_passes(request.module, target.passes(request))
    compiled = target.compile(replace(request, module=module), lambda message: None)
    launches = read_launches(path)
    if not native:
        launches = interpretable(launches, path, sources)
    vocab_size = read_plan(path / PLAN_FILE).vocab_size
    return _Engine(path, launches, compiled, vocab_size, sources, request.module, request.reader)


def stand_in_for_compiler() -> dict[str, Any]:
    """Let this process write keys of sources in place of cubins; fills what it returns with the
    sources by their keys."""
    from tests.support import compiled
    from trtc.builder.targets import cuda_lowering

    sources: dict[str, Any] = {}

    def stand_in(source: Any, sm: int, triton: Any) -> Any:
        kernel = compiled.stand_in(source, sm)
        sources[kernel.cubin.decode()] = source
        return kernel

    cuda_lowering.compile_source = stand_in
    return sources


def interpretable(launches: LaunchPlan, engine: Path, sources: Mapping[str, Any]) -> LaunchPlan:
    """Without the variants that have CUDA C++ in them, which no interpreter runs."""
    import msgspec

    from trtc.plugins.gpu.sources import CudaSource
    from trtc.protos.launch_plan import KernelCall

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
