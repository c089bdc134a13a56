"""The TensorRT for RTX target: a complete engine of plans, built on a machine without a GPU.

TensorRT for RTX has no plugins, so the graph is cut at the attention layers and each segment
becomes a plan; the plugins' kernels are cross-compiled and launched between them. Plans hold their
weights: without a GPU the library can neither strip nor refit them, and a layer's segment differs
from the next layer's in its weights, so there are as many plans as layers, and one more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trtc.builder.passes.base import Pass
from trtc.builder.passes.order import TENSORRT_PASSES
from trtc.builder.targets.base import Compiled, CompileRequest, refuse_dynamic
from trtc.builder.targets.gpu.triton import TRITON_VERSION, check_triton
from trtc.builder.targets.tensorrt.cut import Subgraph, cut
from trtc.builder.targets.tensorrt.kernels import write_kernels
from trtc.builder.targets.tensorrt.plan import PlanOptions, build_plan
from trtc.builder.targets.tensorrt.stages import cut_stages
from trtc.builder.targets.tensorrt.target import (
    check_graph,
    check_scheme,
    make_profiles,
    place_weights,
    weights_bytes,
)
from trtc.builder.weights_file import with_external_weights, write_weights
from trtc.plugins.gpu.arch import RTX_SMS
from trtc.plugins.gpu.probe import device_sm
from trtc.plugins.tensorrt.library import TENSORRT_RTX, load_vendor
from trtc.protos.bundle import KERNELS_DIR, Profile
from trtc.protos.errors import UnsupportedError
from trtc.protos.manifest import WEIGHTS_FILE, ByteLedger, TargetFacts
from trtc.protos.progress import Progress, Step
from trtc.protos.record import record_json
from trtc.protos.stages import PLANS_DIR, STAGES_FILE
from trtc.quant.scheme import Scheme

_OPTIMIZATION_LEVEL = 3
_WORKSPACE_BYTES = 4 << 30


@dataclass(frozen=True)
class TensorRtRtxTarget:
    """`tensorrt-rtx:sm_89[,sm_120]`."""

    sms: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"tensorrt-rtx:{','.join(self.archs)}"

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(f"sm_{sm}" for sm in self.sms)

    @property
    def runs_here(self) -> bool:
        """With the library, which a build needs anyway, on one of the GPUs."""
        return device_sm() in self.sms

    @property
    def window_groups(self) -> bool:
        """Layers of several groups write to one memory, which the library never sees: kernels that
        trtc launches between plans do."""
        return True

    @property
    def keeps_states(self) -> bool:
        return False

    @property
    def attends_to_latents(self) -> bool:
        return False

    @property
    def shares_keys(self) -> bool:
        return False

    @property
    def has_layer_inputs(self) -> bool:
        return False

    @property
    def has_sinks(self) -> bool:
        return False

    @property
    def rounds_rows(self) -> bool:
        return False

    @property
    def multiplies_fp4(self) -> bool:
        return True

    @property
    def scales_kv(self) -> bool:
        return False

    @property
    def max_ranks(self) -> int:
        return 1

    def check(self, scheme: Scheme) -> None:
        check_triton("tensorrt-build")
        _load()
        self.check_scheme(scheme)

    def check_scheme(self, scheme: Scheme) -> None:
        refuse_dynamic(scheme, self.name)
        for sm in self.sms:
            check_scheme(scheme, sm)

    def passes(self, request: CompileRequest) -> tuple[Pass, ...]:
        check_graph(request)
        return TENSORRT_PASSES

    def compile(self, request: CompileRequest, progress: Progress) -> Compiled:
        module, kv = request.module, request.module.kv
        progress(Step(f"compiling kernels for {', '.join(self.archs)}"))
        kernels = {
            arch: write_kernels(module, sm, request.workdir, f"{KERNELS_DIR}/{arch}")
            for arch, sm in zip(self.archs, self.sms, strict=True)
        }
        weights = place_weights(module)
        weights_file = request.scratch / WEIGHTS_FILE
        write_weights([weights_file], weights, module.recipes, request.reader, progress)
        subgraphs = cut(with_external_weights(module.model, weights))
        profiles = make_profiles(request.limits, kv)
        trt = _load()
        plans = self._write_plans(trt, subgraphs, profiles, request, progress)
        stages = cut_stages(module, subgraphs, plans, profiles, kernels)
        (request.workdir / STAGES_FILE).write_bytes(record_json(stages))
        return Compiled(
            facts=TargetFacts(
                kind="tensorrt_rtx",
                name=self.name,
                archs=self.archs,
                toolchain=f"triton {TRITON_VERSION}, TensorRT for RTX {trt.__version__}",
                plan_version=trt.__version__,
            ),
            kv=kv,
            ledger=ByteLedger(
                weights=weights_bytes(weights),
                activations=stages.arena_bytes,
                page=kv.page_bytes,
            ),
        )

    def _write_plans(
        self,
        trt: Any,
        subgraphs: Sequence[Subgraph],
        profiles: tuple[Profile, ...],
        request: CompileRequest,
        progress: Progress,
    ) -> list[str]:
        """Build the plan of every subgraph, one at a time; their files in the engine."""

        def configure(config: Any) -> None:
            config.num_compute_capabilities = len(self.sms)
            for index, sm in enumerate(self.sms):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)

        options = PlanOptions(profiles, _OPTIMIZATION_LEVEL, _WORKSPACE_BYTES, configure=configure)
        (request.workdir / PLANS_DIR).mkdir()
        plans = []
        for number, subgraph in enumerate(subgraphs):
            graph = request.scratch / f"segment-{number}.onnx"
            graph.write_bytes(subgraph.model.SerializeToString(deterministic=True))
            label = f"segment {number + 1}/{len(subgraphs)}"
            built = build_plan(trt, graph, options, partial(_report, progress, label))
            plans.append(f"{PLANS_DIR}/segment-{number}.plan")
            (request.workdir / plans[-1]).write_bytes(built.plan)
        return plans


def _load() -> Any:
    return load_vendor(TENSORRT_RTX, "build plans")


def _report(progress: Progress, label: str, step: Step) -> None:
    progress(Step(f"{label}  {step.phase}", step.done, step.total, step.unit))


def parse_tensorrt_rtx_target(detail: str) -> TensorRtRtxTarget:
    """The part of `--target` after `tensorrt-rtx:`.

    Raises:
        UnsupportedError: not an SM that TensorRT for RTX makes plans for, or none.
    """
    known = {f"sm_{sm}": sm for sm in RTX_SMS}
    wanted = [arch.strip() for arch in detail.split(",")]
    for arch in wanted:
        if arch not in known:
            raise UnsupportedError(
                f"{arch!r} is not an SM that TensorRT for RTX makes plans for"
                if arch
                else "says no SM",
                field="--target",
                remedy=f"Use one or more of {', '.join(known)}, as in "
                "tensorrt-rtx:sm_89,sm_120; for others there is tensorrt:sm_90",
            )
    return TensorRtRtxTarget(tuple(sm for arch, sm in known.items() if arch in wanted))
