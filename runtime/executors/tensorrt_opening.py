"""Opens an engine of TensorRT plans, after checking that this machine supports it.

    library -> its version -> GPU -> [session.py: pool, hashes] -> geometry -> plans -> memory

A plan is native code: none is passed to the library before all files have been hashed and checked
against each other.
"""

import mmap
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtc.plugins.gpu.probe import device_sm
from trtc.plugins.tensorrt.library import TENSORRT, TENSORRT_RTX, Vendor, load_vendor, make_logger
from trtc.plugins.tensorrt.refit import refit_engine
from trtc.protos.bundle import RECIPE_FILE, KernelFacts, max_pool_pages, read_recipe
from trtc.protos.errors import EngineCorruptError, EngineIncompatibleError, EnvironmentFault
from trtc.protos.manifest import GRAPH_FILE, WEIGHTS_FILE, Manifest
from trtc.protos.record import first_difference
from trtc.protos.stages import STAGES_FILE, Segment, Stages, read_stages
from trtc.runtime.device.base import DriverDevice, DriverKernel
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.device.driver_api import DriverApi
from trtc.runtime.executors.opening import OpenRequest
from trtc.runtime.executors.tensorrt import LoadedStage, TensorRtExecutor
from trtc.runtime.executors.tensorrt_launch import LoadedLaunch
from trtc.runtime.executors.tensorrt_memory import step_tensors
from trtc.runtime.executors.tensorrt_plan import LoadedPlan
from trtc.runtime.integrity.engine_files import REBUILD

_POOL_SHARE = 0.9
"""Share of the free GPU memory for the pool; the rest is for the plans' scratch memory and the
library."""


def open_device() -> DriverDevice:
    return CudaDriverDevice(DriverApi("tensorrt"))


def prepare_tensorrt(request: OpenRequest) -> "TensorRtOpening":
    """A compiled bundle; see `Prepare`."""
    manifest = request.manifest
    if not manifest.target.plan_version:
        raise EngineIncompatibleError(
            "the bundle has no plan yet",
            field="manifest.json: target.plan_version",
            remedy=f"Run `trtc compile {request.engine}` on the GPU host",
        )
    version = manifest.target.plan_version
    return _prepare(request, TENSORRT, f"Run `trtc compile` here, or install TensorRT {version}")


def prepare_tensorrt_rtx(request: OpenRequest) -> "TensorRtOpening":
    """An engine of TensorRT for RTX; see `Prepare`."""
    version = request.manifest.target.plan_version
    remedy = f"pip install tensorrt-rtx-cu13=={version}, or build the engine again with this one"
    return _prepare(request, TENSORRT_RTX, remedy)


def _prepare(request: OpenRequest, vendor: Vendor, other_version: str) -> "TensorRtOpening":
    target = request.manifest.target
    trt = load_vendor(vendor, "run the engine")
    if trt.__version__ != target.plan_version:
        raise EngineIncompatibleError(
            f"the plans are of {vendor.title} {target.plan_version}, this machine has "
            f"{trt.__version__}",
            field="manifest.json: target.plan_version",
            remedy=other_version,
        )
    sm = device_sm()
    if sm is None:
        raise EnvironmentFault(
            "is needed to run the engine",
            field="an NVIDIA GPU and its driver",
            remedy="See nvidia-smi; in a container, start it with GPUs (--gpus all)",
        )
    if f"sm_{sm}" not in target.archs:
        raise EngineIncompatibleError(
            f"the engine is for {', '.join(target.archs)}, this GPU is sm_{sm}",
            field="manifest.json: target.archs",
            remedy=f"Build with --target {target.name.partition(':')[0]}:sm_{sm}",
        )
    return TensorRtOpening(request, trt, f"sm_{sm}")


@dataclass(frozen=True)
class TensorRtOpening:
    """An engine of plans that this machine's library and GPU can run (implements Opening)."""

    request: OpenRequest
    trt: Any
    """The library's module."""
    arch: str

    @property
    def files(self) -> tuple[str, ...]:
        """Files to verify; `open` checks that the files of stages.json are listed too."""
        return (STAGES_FILE,)

    @property
    def pool_share(self) -> float:
        return _POOL_SHARE

    @property
    def max_pages(self) -> int | None:
        return max_pool_pages(self.request.manifest.limits, self.request.manifest.kv)

    def free_bytes(self) -> int:
        ledger = self.request.manifest.ledger
        device = open_device()
        try:
            return device.free_bytes() - ledger.weights - ledger.activations
        finally:
            device.close()

    def close(self) -> None:
        """Nothing to release."""

    def open(self, num_pages: int) -> TensorRtExecutor:
        engine, manifest = self.request.engine, self.request.manifest
        stages = read_stages(engine)
        _check_geometry(engine, manifest, stages)
        _check_listed(manifest, stages, self.arch)
        with ExitStack() as undo:
            device = open_device()
            undo.callback(device.close)
            loader = _Loader(self.trt, device, engine, manifest, stages, self.arch)
            executor = TensorRtExecutor(
                device,
                stages,
                loader.load(),
                limits=manifest.limits,
                vocab_size=manifest.model.vocab_size,
                num_pages=num_pages,
            )
            undo.pop_all()
        return executor


class _Loader:
    """Loads an engine's plans and kernels onto a device."""

    def __init__(
        self,
        trt: Any,
        device: DriverDevice,
        engine: Path,
        manifest: Manifest,
        stages: Stages,
        arch: str,
    ) -> None:
        self._trt = trt
        self._device = device
        self._engine = engine
        self._stages = stages
        self._kernels = stages.kernels.get(arch, ())
        self._tensors = step_tensors(stages, manifest.model.vocab_size)
        self._log = make_logger(trt)
        self._runtime = trt.Runtime(self._log)

    def load(self) -> list[LoadedStage]:
        kernels = [(facts, self._load_kernel(facts)) for facts in self._kernels]
        return [
            self._load_plan(stage)
            if isinstance(stage, Segment)
            else LoadedLaunch(self._device, stage, kernels, self._stages.pool.page_size)
            for stage in self._stages.stages
        ]

    def _load_kernel(self, facts: KernelFacts) -> DriverKernel:
        code = (self._engine / facts.cubin).read_bytes()
        handle = self._device.load_kernel(code, facts.entry)
        return DriverKernel(handle, facts.num_threads, facts.shared_bytes)

    def _load_plan(self, segment: Segment) -> LoadedPlan:
        """Deserialise a plan, whose bytes are mapped; the library makes its own copy."""
        with (
            (self._engine / segment.plan).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan,
        ):
            self._check_validity(segment, plan)
            engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise self._refusal(segment, self._log.last_error)
        if engine.refittable:
            refit_engine(self._trt, self._log, engine, self._engine / GRAPH_FILE)
        return LoadedPlan(self._trt, self._log, engine, segment, self._tensors, self._device.stream)

    def _check_validity(self, segment: Segment, plan: mmap.mmap) -> None:
        """Check with TensorRT for RTX, without deserialising, that a plan is valid on this GPU."""
        ask = getattr(self._runtime, "get_engine_validity", None)
        if ask is None:
            return
        validity, diagnostics = ask(plan)
        if validity == self._trt.EngineValidity.INVALID:
            raise self._refusal(segment, f"not valid on this GPU (diagnostics {diagnostics:#x})")

    def _refusal(self, segment: Segment, reason: str) -> EngineIncompatibleError:
        return EngineIncompatibleError(
            f"the library refuses the plan: {reason}",
            field=segment.plan,
            remedy="Compile the bundle, or build the engine, again for this machine",
        )


def _check_geometry(engine: Path, manifest: Manifest, stages: Stages) -> None:
    """Check that the manifest, the plans and, in a bundle, the recipe have the same KV pool."""
    pools = [(STAGES_FILE, stages.pool)]
    if RECIPE_FILE in manifest.files:
        pools.append((RECIPE_FILE, read_recipe(engine).pool))
    for name, pool in pools:
        if pool != manifest.kv:
            field, found, wanted = first_difference(pool, manifest.kv)
            raise EngineIncompatibleError(
                f"is {found}, and manifest.json says {wanted}",
                field=f"{name}: pool{field}",
                remedy="The files are of different builds: build the engine again",
            )


def _check_listed(manifest: Manifest, stages: Stages, arch: str) -> None:
    """Check that the manifest lists all files of stages.json, and the weights for refitting, so
    that they have been hashed."""
    cubins = (kernel.cubin for kernel in stages.kernels.get(arch, ()))
    weights = (GRAPH_FILE, WEIGHTS_FILE) if manifest.target.kind == "tensorrt" else ()
    for name in (*stages.plans, *cubins, *weights):
        if name not in manifest.files:
            raise EngineCorruptError(
                "is not listed", field=f"manifest.json: files.{name}", remedy=REBUILD
            )
