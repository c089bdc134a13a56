"""The CUDA target: plan -> kernels cross-compiled to cubins -> launch plan, without a GPU."""

from dataclasses import dataclass, replace

import msgspec
import onnx

from trtc.builder.passes.base import Pass
from trtc.builder.passes.order import cuda_passes, tables_on_cuda
from trtc.builder.plan import make_plan
from trtc.builder.recipes import Apply, Concat, Recipe, Shard, TensorReader
from trtc.builder.targets.base import Compiled, CompileRequest, refuse_fp4
from trtc.builder.targets.cuda_lowering import write_launches
from trtc.builder.targets.gpu.lowerings import lowerings
from trtc.builder.targets.gpu.nvrtc import NVRTC_VERSION, check_nvrtc
from trtc.builder.targets.gpu.triton import TRITON_VERSION, check_triton
from trtc.builder.transforms import ScalePerRow
from trtc.builder.weights_file import with_external_weights, write_weights
from trtc.plugins.gpu.arch import ARCHS, sm_of_target
from trtc.plugins.gpu.probe import device_sm
from trtc.plugins.registry import REGISTRY
from trtc.protos.errors import UnsupportedError
from trtc.protos.launch_plan import LAUNCHES_FILE, launches_json
from trtc.protos.manifest import (
    GRAPH_FILE,
    PLAN_FILE,
    ByteLedger,
    Limits,
    TargetFacts,
    weights_files,
)
from trtc.protos.progress import Progress, Step
from trtc.protos.step import MAX_DRAFT_TOKENS
from trtc.quant.scheme import Scheme

_DRAFT_ROWS = 1 + MAX_DRAFT_TOKENS
"""Least rows of a step's batch: a sequence's last token and its drafts."""


@dataclass(frozen=True)
class CudaTarget:
    """`cuda:sm_90`."""

    sm: int

    @property
    def name(self) -> str:
        return f"cuda:sm_{self.sm}"

    @property
    def runs_here(self) -> bool:
        """On a GPU of this SM. A build needs none, and measures the CPU twin without."""
        return device_sm() == self.sm

    @property
    def window_groups(self) -> bool:
        return True

    @property
    def keeps_states(self) -> bool:
        return True

    @property
    def attends_to_latents(self) -> bool:
        return True

    @property
    def shares_keys(self) -> bool:
        return True

    @property
    def has_layer_inputs(self) -> bool:
        return True

    @property
    def has_sinks(self) -> bool:
        return True

    @property
    def rounds_rows(self) -> bool:
        return True

    @property
    def multiplies_fp4(self) -> bool:
        return False

    @property
    def scales_kv(self) -> bool:
        return True

    @property
    def max_ranks(self) -> int:
        return 8

    def check(self, scheme: Scheme) -> None:
        self.check_scheme(scheme)
        check_triton("cuda-build")
        check_nvrtc()

    def check_scheme(self, scheme: Scheme) -> None:
        refuse_fp4(scheme, self.name)
        if "f8e4m3" in (scheme.weight, scheme.activation) and not ARCHS[self.sm].has_e4m3:
            raise UnsupportedError(
                f"sm_{self.sm} has no E4M3 arithmetic",
                field="--dtype",
                remedy="Use bf16, or a target from sm_89 on",
            )

    def passes(self, request: CompileRequest) -> tuple[Pass, ...]:
        return cuda_passes(
            request.scheme,
            request.reader,
            request.ranks,
            ep=request.ep,
            tables=request.tables,
        )

    def compile(self, request: CompileRequest, progress: Progress) -> Compiled:
        progress(Step("planning"))
        limits = _with_draft_rows(request.module.limits)
        # A step has no more logit rows than sequences (see step_block).
        plan = make_plan(
            replace(request.module, limits=limits), REGISTRY, max_logit_rows=limits.max_batch_size
        )
        (request.workdir / PLAN_FILE).write_bytes(plan.to_json())
        weights = weights_files(request.ranks)
        graph = with_external_weights(request.module.model, plan.weights, weights[0])
        onnx.save_model(graph, str(request.workdir / GRAPH_FILE))
        launches = write_launches(
            plan,
            self.sm,
            lowerings(),
            request.workdir,
            progress,
            is_uniform=lambda name: _is_uniform(request.module.recipes[name], request.reader),
        )
        (request.workdir / LAUNCHES_FILE).write_bytes(launches_json(launches))
        if not request.dummy_weights:
            write_weights(
                [request.workdir / name for name in weights],
                plan.weights,
                request.module.recipes,
                request.reader,
                progress,
            )
        return Compiled(
            facts=TargetFacts(
                kind="cuda",
                name=self.name,
                archs=(f"sm_{self.sm}",),
                toolchain=f"triton {TRITON_VERSION}, nvrtc {NVRTC_VERSION}",
                tp=request.ranks,
                ep=request.ep,
            ),
            kv=plan.kv,
            ledger=ByteLedger(
                weights=plan.weights_bytes,
                activations=launches.fixed_bytes(plan.vocab_size),
                page=plan.kv.page_bytes,
            ),
            tables=tables_on_cuda(request.scheme, request.tables),
        )


def _with_draft_rows(limits: Limits) -> Limits:
    """Steps of few sequences have room for drafts, each of which is a sequence of the batch (see
    runtime/executors/base.py's DraftRows)."""
    rows = min(_DRAFT_ROWS, limits.max_num_tokens)
    return msgspec.structs.replace(limits, max_batch_size=max(limits.max_batch_size, rows))


def _is_uniform(scale: Recipe, reader: TensorReader) -> bool:
    """Whether it is one scale spread over all rows, or several that are equal: calibration gives
    one scale to linears that are merged."""
    whole = scale.source if isinstance(scale, Shard) else scale
    parts = whole.sources if isinstance(whole, Concat) else (whole,)
    if not all(isinstance(one, Apply) and isinstance(one.function, ScalePerRow) for one in parts):
        return False
    values = whole.load(reader)
    return bool((values == values.reshape(-1)[0]).all())


def parse_cuda_target(detail: str) -> CudaTarget:
    """The part of `--target` after `cuda:`.

    Raises:
        UnsupportedError: not an SM that kernels are compiled for, or none.
    """
    return CudaTarget(sm_of_target("cuda", detail))
