"""A bundle to `model.plan` on a machine that has TensorRT 11 and the GPU: `trtc compile`."""

import importlib
import os
from pathlib import Path
from typing import Any

import msgspec

from trtc.builder.package import file_facts
from trtc.builder.targets.tensorrt_plan import PlanOptions, Progress, build_plan
from trtc.plugins.cuda.gpu import device_sm
from trtc.plugins.cuda.qdp import Kernels
from trtc.plugins.kv_write.tensorrt import register as register_kv_write
from trtc.plugins.paged_attention.tensorrt import register as register_paged_attention
from trtc.protos.bundle import PLAN_BLOB_FILE, TIMING_CACHE_FILE, Recipe, read_recipe
from trtc.protos.errors import (
    EngineCorruptError,
    EngineIncompatibleError,
    EnvironmentFault,
    RequestError,
)
from trtc.protos.manifest import GRAPH_FILE, MANIFEST_FILE, Manifest, read_manifest

_INSTALL = "Install TensorRT 11 from NVIDIA's index (pip install 'trtc[tensorrt]') on the GPU host"


def compile_bundle(bundle: Path, progress: Progress) -> Manifest:
    """Build the plan of a bundle and write it there; the manifest changes last.

    Raises:
        RequestError: not a TensorRT bundle.
        EngineCorruptError: a file differs from the manifest.
        EnvironmentFault: TensorRT, its library or a GPU is missing.
        EngineIncompatibleError: another TensorRT or GPU than the bundle is for.
        UnsupportedError: TensorRT refuses the graph.
    """
    manifest = read_manifest(bundle)
    if manifest.target.kind != "tensorrt":
        raise RequestError(
            f"is an engine for {manifest.target.name}, which is compiled already",
            field=str(bundle),
            remedy="Give a directory written by `trtc build --target tensorrt:sm_90`",
        )
    progress("checking the bundle")
    _check_files(bundle, manifest)
    recipe = read_recipe(bundle)
    trt = open_tensorrt(recipe)
    _check_gpu(recipe)
    _register_plugins(bundle, recipe)
    cache = bundle / TIMING_CACHE_FILE
    built = build_plan(
        trt,
        bundle / GRAPH_FILE,
        PlanOptions(
            profiles=recipe.profiles,
            optimization_level=recipe.optimization_level,
            workspace_bytes=recipe.workspace_bytes,
            timing_cache=cache.read_bytes() if cache.is_file() else b"",
            alias_pools=recipe.alias_pools,
        ),
        progress,
    )
    assert built.timing_cache is not None
    _replace(bundle / PLAN_BLOB_FILE, built.plan)
    _replace(cache, built.timing_cache)
    toolchain = manifest.target.toolchain.rpartition(", ")[0]
    sealed = msgspec.structs.replace(
        manifest,
        target=msgspec.structs.replace(
            manifest.target, toolchain=f"{toolchain}, TensorRT {trt.__version__}"
        ),
        files=manifest.files
        | {name: file_facts(bundle / name) for name in (PLAN_BLOB_FILE, TIMING_CACHE_FILE)},
    ).sealed()
    _replace(bundle / MANIFEST_FILE, sealed.to_json())
    return sealed


def _register_plugins(bundle: Path, recipe: Recipe) -> None:
    trtp = importlib.import_module("tensorrt.plugin")
    kernels = Kernels(recipe.kernels, lambda name: (bundle / name).read_bytes())
    register_kv_write(trtp, kernels, alias_pools=recipe.alias_pools)
    register_paged_attention(trtp, kernels)


def open_tensorrt(recipe: Recipe) -> Any:
    """The module `tensorrt`, of the major version that the recipe is for.

    Raises:
        EnvironmentFault: it, or its library, is not installed.
        EngineIncompatibleError: another major version.
    """
    try:
        trt = importlib.import_module("tensorrt")
    except (ImportError, OSError) as error:
        raise EnvironmentFault(
            f"is needed to compile a plan and does not load ({error})",
            field="tensorrt",
            remedy=_INSTALL,
        ) from error
    major = int(trt.__version__.split(".")[0])
    if major != recipe.tensorrt_major:
        raise EngineIncompatibleError(
            f"the bundle is for TensorRT {recipe.tensorrt_major}, this machine has "
            f"{trt.__version__}",
            field="recipe.json: tensorrt_major",
            remedy=_INSTALL,
        )
    return trt


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


def _check_files(bundle: Path, manifest: Manifest) -> None:
    for name, facts in manifest.files.items():
        path = bundle / name
        if not path.is_file() or file_facts(path) != facts:
            raise EngineCorruptError(
                "is missing or differs from the manifest",
                field=str(path),
                remedy="Copy the bundle again from where it was built",
            )


def _replace(path: Path, content: bytes) -> None:
    """A reader sees the old file or the new one."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
