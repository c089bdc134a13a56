"""Compiled engines for tests: built without measuring, opened without the server."""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from numpy.typing import NDArray

from tests.support.evaluate import LIMITS, PAGE_SIZE
from tests.support.models import architecture_of, assert_greedy, tiny_config
from tests.support.steps import Run, Stepper
from trtc.builder.checkpoint.dummy import DummyReader, dummy_checkpoint
from trtc.builder.evaluator import Evaluator
from trtc.builder.families.registry import decoder_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.pipeline import BuildResult, build
from trtc.builder.probe import EngineProbe
from trtc.builder.recipes import Array
from trtc.builder.request import BuildRequest
from trtc.builder.targets.base import CompileRequest
from trtc.builder.targets.cpu import CpuTarget
from trtc.plugins.cpu.host import object_file, runnable_isas
from trtc.plugins.iq4 import scales_of
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import (
    GRAPH_FILE,
    PLAN_FILE,
    WEIGHTS_FILE,
    read_manifest,
)
from trtc.protos.plan import read_plan
from trtc.protos.step import GRAPH_INPUTS, group_input
from trtc.quant.scheme import Scheme
from trtc.runtime.executors.base import Executor, StepBatch
from trtc.runtime.executors.cpu import CpuEngineFiles, CpuExecutor
from trtc.runtime.executors.cpu_opening import prepare_cpu
from trtc.runtime.executors.opening import OpenRequest
from trtc.runtime.executors.weights import map_weights

NUM_PAGES = 64


def build_tiny(
    model: Path,
    output: Path,
    dtype: str | None = "fp32",
    *,
    isas: tuple[str, ...] = (),
    probe: EngineProbe | None = None,
    optimization: str | None = None,
    **options: Any,
) -> BuildResult:
    """An engine with the limits of tests/support/evaluate.py, for this machine's best ISA.

    Args:
        optimization: it may not change a bit of any result. By default -O1 for a model with a
            tokenizer, which is trained and asked for many tokens, and -O0 for others, which take
            longer to compile than to run.
    """
    fields = {
        "max_batch_size": LIMITS.max_batch_size,
        "max_seq_len": LIMITS.max_seq_len,
        "max_num_tokens": LIMITS.max_num_tokens,
        "page_size": PAGE_SIZE,
        **options,
    }
    request = BuildRequest(model=str(model), output=output, dtype=dtype, **fields)
    is_asked = (model / "tokenizer.json").exists() and not request.dummy_weights
    level = optimization or ("-O1" if is_asked else "-O0")
    target = CpuTarget(isas or runnable_isas()[:1], level)
    return build(request, probe=probe, target=target)


def open_executor(engine: Path, *, num_threads: int = 1, num_pages: int = NUM_PAGES) -> CpuExecutor:
    """An executor whose pool holds NaN wherever nothing has been written; of as many threads as
    are asked for, whatever the cores."""
    opening = prepare_cpu(OpenRequest(engine, read_manifest(engine), 1, dummy_weights=False))
    request = opening.request._replace(num_threads=num_threads)
    executor = opening._replace(request=request).open(num_pages)
    fill_pool(executor, 0xFF)
    return executor


def fill_pool(executor: CpuExecutor, byte: int) -> None:
    for region in executor._pool._regions:
        region[:] = byte


def engine_stepper(
    executor: Executor, *, scramble: int | None = 1, num_pages: int = NUM_PAGES
) -> Stepper:
    """The same driver as the evaluator's, over an engine and its own pool."""
    return Stepper(engine_run(executor), executor.kv, num_pages, scramble, executor.limits)


def greedy_answers(
    checkpoint: Path, engine: Path, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """The greedy continuation of each prompt: the engine's, one prompt after another, of which
    Transformers chooses every token too."""
    executor = open_executor(engine)
    try:
        found = [engine_stepper(executor).greedy(prompt, num_tokens) for prompt in prompts]
    finally:
        executor.close()
    for prompt, tokens in zip(prompts, found, strict=True):
        assert_greedy(checkpoint, prompt, tokens, num_tokens)
    return found


def engine_run(executor: Executor) -> Run:
    def run(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        groups = range(max(1, len(executor.kv.groups)))
        arrays = {
            one.name: np.concatenate(
                [inputs[group_input(one.name, group)] for group in groups if one.per_group]
                or [inputs[one.name]]
            )
            for one in GRAPH_INPUTS
        }
        pools = {f"{name}_out": pool for name, pool in inputs.items() if name.startswith("kv_")}
        return {"logits": executor.logits(StepBatch(**arrays)), **pools}

    return run


def assert_close(found: NDArray[Any], expected: NDArray[Any], tolerance: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@dataclass(frozen=True)
class Compiled:
    """A model without a checkpoint, compiled, beside its graph for the evaluator."""

    executor: CpuExecutor
    evaluator: Evaluator
    kv: CacheLayout


def compile_dummy(
    family: str,
    scheme: Scheme,
    directory: Path,
    *,
    kv_dtype: str | None = None,
    exact_activations: bool = False,
    isas: tuple[str, ...] = (),
    **overrides: Any,
) -> Compiled:
    """Lower a tiny model with random canonical tensors of a quantised scheme, without ModelOpt.

    The evaluator runs the very file that the engine ships.
    """
    request = dummy_request(
        family, scheme, directory, kv_dtype, exact_activations=exact_activations, **overrides
    )
    engine = request.workdir
    # Models without trained weights are small: compiling them takes longer than running them.
    target = CpuTarget(isas or runnable_isas()[:1], optimization="-O0")
    module, _ = run_passes(request.module, target.passes(request))
    target.compile(replace(request, module=module), lambda message: None)
    plan = read_plan(engine / PLAN_FILE)
    shipped = Module(onnx.load(str(engine / GRAPH_FILE)), {}, module.kv, LIMITS)
    executor = CpuExecutor(
        CpuEngineFiles(
            engine / object_file(target.isas[0]),
            map_weights(engine / WEIGHTS_FILE, plan.weights_bytes),
            hashlib.sha256((engine / PLAN_FILE).read_bytes()).hexdigest(),
        ),
        limits=LIMITS,
        kv=module.kv,
        vocab_size=plan.vocab_size,
        num_pages=NUM_PAGES,
        num_threads=1,
    )
    return Compiled(executor, Evaluator(shipped, request.reader), module.kv)


def dummy_request(
    family: str,
    scheme: Scheme,
    directory: Path,
    kv_dtype: str | None,
    *,
    exact_activations: bool,
    window_groups: bool = False,
    ranks: int = 1,
    ep: bool = False,
    **overrides: Any,
) -> CompileRequest:
    """What a target is asked to compile: a tiny model with random canonical tensors of a scheme."""
    spec = decoder_spec(config_dict(family, **overrides), LIMITS.max_seq_len)
    dummy, quantization = dummy_checkpoint(spec, scheme)
    reader = LivelyReader(dummy, scheme)
    graph = GraphRequest(
        scheme,
        kv_dtype or scheme.dtype,
        LIMITS,
        quantization,
        PAGE_SIZE,
        window_groups=window_groups,
    )
    engine, scratch = directory / "engine", directory / "scratch"
    engine.mkdir(parents=True)
    scratch.mkdir()
    return CompileRequest(
        module=build_graph(spec, graph, reader),
        reader=reader,
        scheme=scheme,
        limits=LIMITS,
        exact_activations=exact_activations,
        dummy_weights=False,
        workdir=engine,
        scratch=scratch,
        ranks=ranks,
        ep=ep,
    )


class LivelyReader:
    """A dummy checkpoint with scales as calibration would choose them.

    The dummy's own are tiny, so that layers would hardly add to the residual stream and a wrong
    kernel could hide behind it.
    """

    _CODE_STD: ClassVar = {
        "f8e4m3": 64.0,
        "f4e2m1": 2.0,
        "i8": 40.0,
        "i6": 10.0,
        "i4": 2.5,
        "iq4": 37.0,
    }
    _ACTIVATION_SCALE: ClassVar = {
        "f8e4m3": 4 / 448,
        "f4e2m1": 4 / 6 / 448,
        "i8": 4 / 127,
    }

    def __init__(self, dummy: DummyReader, scheme: Scheme) -> None:
        self._dummy = dummy
        self._scheme = scheme
        weight = scheme.weight
        self._std = self._CODE_STD.get("i4" if weight == "i4_f8" else weight, 1.0)

    def read(self, name: str) -> Array:
        values = self._dummy.read(name)
        # Gate and up of an expert share their pre-scale.
        seed = name.rsplit(".", 2)[0] if name.endswith("pre_quant_scale") else name
        random = np.random.default_rng(zlib.crc32(seed.encode()))
        jitter = random.uniform(0.7, 1.4, values.shape).astype(np.float32)
        if name.endswith("input_scale"):
            return values * 0 + np.float32(self._ACTIVATION_SCALE[self._scheme.activation]) * jitter
        if name.endswith("pre_quant_scale"):
            return values * jitter
        if name.endswith("weight_scale") and self._scheme.weight == "f4e2m1":
            return 64 * jitter
        if name.endswith("weight_scale_2") and self._scheme.weight == "f4e2m1":
            weight = self._dummy.tensors[name.removesuffix("_scale_2")][1]
            return np.asarray(1 / (64 * self._std * np.sqrt(weight[1])), np.float32)
        if name.endswith("weight_scale"):
            weight = self._dummy.tensors[name.removesuffix("_scale")][1]
            size = np.float32(1 / (self._std * np.sqrt(weight[1])))
            if self._scheme.weight == "iq4":
                # Sizes of 0.5 to 2 units, of either sign.
                codes = random.integers(96, 128, values.shape, np.uint8)
                codes |= random.choice(np.array((0, 128), np.uint8), values.shape)
                return scales_of(codes, np.exp2(np.floor(np.log2(size))))
            return size * jitter
        return values


def config_dict(family: str, **overrides: Any) -> dict[str, Any]:
    """A tiny config.json as Transformers writes it."""
    config = tiny_config(family, **overrides)
    fields = json.loads(config.to_json_string(use_diff=False))
    return {**fields, "architectures": [architecture_of(family)]}
