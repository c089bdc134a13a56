"""Compiles a bundle to `model.plan` on a machine that has TensorRT 11 and the GPU.

`trtc compile` does it to a bundle from elsewhere, `trtc build` to its own where it can.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trtc.builder.targets.tensorrt.plan import PlanOptions, build_plan
from trtc.plugins.attention_combine.tensorrt import register as register_attention_combine
from trtc.plugins.attention_split.tensorrt import register as register_attention_split
from trtc.plugins.gpu.probe import device_sm
from trtc.plugins.kv_write.tensorrt import register as register_kv_write
from trtc.plugins.paged_attention.tensorrt import register as register_paged_attention
from trtc.plugins.tensorrt.aot import Kernels
from trtc.plugins.tensorrt.library import TENSORRT, load_vendor, make_logger
from trtc.plugins.tensorrt.refit import refit_engine
from trtc.protos.bundle import (
    PLAN_BLOB_FILE,
    TENSORRT_MAJOR,
    TIMING_CACHE_FILE,
    Recipe,
    read_recipe,
)
from trtc.protos.errors import (
    EngineCorruptError,
    EngineIncompatibleError,
    EnvironmentFault,
    RequestError,
    TrtcError,
    UnsupportedError,
)
from trtc.protos.manifest import GRAPH_FILE, MANIFEST_FILE, Manifest, TargetFacts, read_manifest
from trtc.protos.progress import Progress, Step
from trtc.protos.staging import claim_directory, replace_files
from trtc.quant.hashing import bytes_facts, file_facts

_PRODUCTS = (PLAN_BLOB_FILE, TIMING_CACHE_FILE)
"""What compiling writes: a compilation that was cut short may have left others than listed."""


@dataclass(frozen=True)
class CompileOptions:
    """What a user may choose about a plan; everything else is in the recipe."""

    strip: bool = True
    """Leave the weights out of the plan: they are refitted from the bundle when it is opened."""
    alias_pools: bool = False
    """Declare that pool outputs are their inputs. Off: the two are bound at one address anyway,
    and a declared alias made TensorRT keep a copy of every pool."""


@dataclass(frozen=True)
class MadePlan:
    """The files of a plan, in memory, and what the manifest says of it."""

    plan: bytes
    timing_cache: bytes
    version: str
    """Exact version of TensorRT."""
    activations: int
    """Bytes of device memory that running it takes, beside weights and pools."""
    options: CompileOptions

    def facts(self, target: TargetFacts) -> TargetFacts:
        """`target` with its plan in the place of an older one, or of none."""
        notes = [
            note
            for note, is_on in (
                ("weights apart", self.options.strip),
                ("pools aliased", self.options.alias_pools),
            )
            if is_on
        ]
        plan = f"TensorRT {self.version}" + (f" ({'; '.join(notes)})" if notes else "")
        kernels = target.toolchain.rpartition(", ")[0]
        return msgspec.structs.replace(
            target, toolchain=f"{kernels}, {plan}", plan_version=self.version
        )


def compile_bundle(
    bundle: Path, progress: Progress, options: CompileOptions = CompileOptions()
) -> Manifest:
    """Build the plan of a bundle and write it there; the manifest changes last.

    Raises:
        RequestError: not a TensorRT bundle.
        OutputError: the bundle cannot be written to, or another compilation of it is at work.
        EngineCorruptError: a file differs from the manifest.
        EnvironmentFault: TensorRT, its library or a GPU is missing.
        EngineIncompatibleError: another TensorRT or GPU than the bundle is for, or a recipe of
            another pool.
        UnsupportedError: TensorRT refuses the graph, or cannot refit the plan.
    """
    manifest = read_manifest(bundle)
    if manifest.target.kind != "tensorrt":
        raise RequestError(
            f"is an engine for {manifest.target.name}, which is compiled already",
            field=str(bundle),
            remedy="Give a directory written by `trtc build --target tensorrt:sm_90`",
        )
    with claim_directory(bundle):
        return _compile(bundle, manifest, progress, options)


def _compile(
    bundle: Path, manifest: Manifest, progress: Progress, options: CompileOptions
) -> Manifest:
    progress(Step("checking the bundle"))
    _check_files(bundle, manifest)
    recipe = read_recipe(bundle)
    if recipe.pool != manifest.kv:
        raise EngineIncompatibleError(
            "is another one than manifest.json's kv",
            field=f"{bundle}/recipe.json: pool",
            remedy="The files are of different builds: build the bundle again",
        )
    made = make_plan(bundle, recipe, _timing_cache(bundle, manifest), progress, options)
    products = {PLAN_BLOB_FILE: made.plan, TIMING_CACHE_FILE: made.timing_cache}
    sealed = msgspec.structs.replace(
        manifest,
        target=made.facts(manifest.target),
        ledger=msgspec.structs.replace(manifest.ledger, activations=made.activations),
        files=manifest.files | {name: bytes_facts(data) for name, data in products.items()},
    ).sealed()
    replace_files(bundle, {**products, MANIFEST_FILE: sealed.to_json()})
    return sealed


def make_plan(
    bundle: Path,
    recipe: Recipe,
    timing_cache: bytes,
    progress: Progress,
    options: CompileOptions = CompileOptions(),
) -> MadePlan:
    """Build the plan of a bundle's files, and see that it opens; writes nothing.

    Raises:
        EnvironmentFault, EngineIncompatibleError, UnsupportedError: as `compile_bundle`.
    """
    trt = open_tensorrt(recipe)
    _check_gpu(recipe)
    _register_plugins(bundle, recipe, options)
    built = build_plan(
        trt,
        bundle / GRAPH_FILE,
        PlanOptions(
            profiles=recipe.profiles,
            optimization_level=recipe.optimization_level,
            workspace_bytes=recipe.workspace_bytes,
            timing_cache=timing_cache,
            alias_pools=options.alias_pools,
            strip=options.strip,
        ),
        progress,
    )
    assert built.timing_cache is not None
    progress(Step("opening the plan"))
    return MadePlan(
        plan=built.plan,
        timing_cache=built.timing_cache,
        version=trt.__version__,
        activations=_open_plan(trt, built.plan, bundle, options),
        options=options,
    )


def compiles_here(sm: int) -> bool:
    """Whether this machine has TensorRT and a GPU of this SM."""
    try:
        trt = load_vendor(TENSORRT, "compile a plan")
    except EnvironmentFault:
        return False
    is_same_major = int(trt.__version__.split(".")[0]) == TENSORRT_MAJOR
    return is_same_major and device_sm() == sm


def open_tensorrt(recipe: Recipe) -> Any:
    """The module `tensorrt`, of the major version that the recipe is for.

    Raises:
        EnvironmentFault: it, or its library, is not installed.
        EngineIncompatibleError: another major version.
    """
    trt = load_vendor(TENSORRT, "compile a plan")
    major = int(trt.__version__.split(".")[0])
    if major != recipe.tensorrt_major:
        raise EngineIncompatibleError(
            f"the bundle is for TensorRT {recipe.tensorrt_major}, this machine has "
            f"{trt.__version__}",
            field="recipe.json: tensorrt_major",
            remedy=TENSORRT.install,
        )
    return trt


def _open_plan(trt: Any, plan: bytes, bundle: Path, options: CompileOptions) -> int:
    """Open a new plan as the runtime will; the device memory that running it takes."""
    log = make_logger(trt)
    engine = trt.Runtime(log).deserialize_cuda_engine(plan)
    if engine is None:
        raise UnsupportedError(
            f"TensorRT built it and does not open it: {log.last_error}", field=PLAN_BLOB_FILE
        )
    if options.strip:
        try:
            refit_engine(trt, log, engine, bundle / GRAPH_FILE)
        except TrtcError as error:
            raise UnsupportedError(
                error.problem, field=error.field, remedy="Run `trtc compile --no-strip`"
            ) from error
    return int(engine.device_memory_size_v2)


def _register_plugins(bundle: Path, recipe: Recipe, options: CompileOptions) -> None:
    trtp = importlib.import_module("tensorrt.plugin")
    kernels = Kernels(recipe.kernels, lambda name: (bundle / name).read_bytes())
    register_kv_write(trtp, kernels, alias_pools=options.alias_pools)
    register_paged_attention(trtp, kernels)
    register_attention_split(trtp, kernels)
    register_attention_combine(trtp, kernels)


def _check_gpu(recipe: Recipe) -> None:
    found = device_sm()
    if found is None:
        raise EnvironmentFault(
            "is needed to compile a plan: TensorRT times kernels on it",
            field="an NVIDIA GPU and its driver",
            remedy="Run `trtc compile` on the GPU host",
        )
    if found != recipe.sm:
        raise EngineIncompatibleError(
            f"the bundle is for sm_{recipe.sm}, this GPU is sm_{found}",
            field="recipe.json: sm",
            remedy=f"Build with --target tensorrt:sm_{found}",
        )


def _timing_cache(bundle: Path, manifest: Manifest) -> bytes:
    """That of the last compilation, if it ended."""
    path = bundle / TIMING_CACHE_FILE
    if path.is_file() and manifest.files.get(TIMING_CACHE_FILE) == file_facts(path):
        return path.read_bytes()
    return b""


def _check_files(bundle: Path, manifest: Manifest) -> None:
    for name, facts in manifest.files.items():
        path = bundle / name
        if name not in _PRODUCTS and (not path.is_file() or file_facts(path) != facts):
            raise EngineCorruptError(
                "is missing or differs from the manifest",
                field=str(path),
                remedy="Copy the bundle again from where it was built",
            )
