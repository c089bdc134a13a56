"""The CPU target: plan -> C++ -> one shared object for each instruction-set level."""

import hashlib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import onnx

import trtc.plugins
from trtc.builder.passes.base import Pass
from trtc.builder.passes.order import cpu_passes, tables_on_cpu
from trtc.builder.plan import make_plan
from trtc.builder.targets.base import Compiled, CompileRequest, refuse_fp4
from trtc.builder.targets.cpu_codegen import generate
from trtc.builder.targets.cxx import Compiler, find_compiler
from trtc.builder.targets.processes import Children
from trtc.builder.weights_file import with_external_weights, write_weights
from trtc.plugins.cpu.host import object_file, runnable_isas
from trtc.plugins.cpu.isa import ISAS
from trtc.plugins.registry import REGISTRY
from trtc.protos.errors import UnsupportedError
from trtc.protos.manifest import GRAPH_FILE, PLAN_FILE, WEIGHTS_FILE, ByteLedger, TargetFacts
from trtc.protos.progress import Progress, Step, counted
from trtc.quant.scheme import Scheme


@dataclass(frozen=True)
class CpuTarget:
    """`cpu` or `cpu:<isa>[,<isa>...]`."""

    isas: tuple[str, ...]
    """Best first."""
    optimization: str = "-O3"
    """For tests, which compile many engines and time none."""

    @property
    def name(self) -> str:
        return f"cpu:{','.join(self.isas)}"

    @property
    def runs_here(self) -> bool:
        return not set(self.isas).isdisjoint(runnable_isas())

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
        return 1

    def check_scheme(self, scheme: Scheme) -> None:
        refuse_fp4(scheme, self.name)

    def check(self, scheme: Scheme) -> None:
        self.check_scheme(scheme)
        compiler = find_compiler()
        for isa in self.isas:
            compiler.check(isa)

    def passes(self, request: CompileRequest) -> tuple[Pass, ...]:
        return cpu_passes(
            request.scheme,
            request.reader,
            exact_activations=request.exact_activations,
            tables=request.tables,
            exact_weights=request.exact_weights,
        )

    def compile(self, request: CompileRequest, progress: Progress) -> Compiled:
        progress(Step("planning"))
        plan = make_plan(request.module, REGISTRY)
        plan_json = plan.to_json()
        (request.workdir / PLAN_FILE).write_bytes(plan_json)
        source = generate(plan, hashlib.sha256(plan_json).hexdigest(), REGISTRY)
        graph = with_external_weights(request.module.model, plan.weights)
        onnx.save_model(graph, str(request.workdir / GRAPH_FILE))
        compiler = find_compiler()
        # The compiler works in processes of its own while this one streams the weights.
        # Children end before the threads that wait for them.
        with ThreadPoolExecutor(len(self.isas)) as pool, Children() as children:
            jobs = [
                pool.submit(self._compile_isa, compiler, source, isa, request, children)
                for isa in self.isas
            ]
            if not request.dummy_weights:
                write_weights(
                    [request.workdir / WEIGHTS_FILE],
                    plan.weights,
                    request.module.recipes,
                    request.reader,
                    progress,
                )
            phase = f"compiling for {', '.join(self.isas)} with {compiler.version}"
            for job in counted(as_completed(jobs), phase, len(jobs), "instruction sets", progress):
                job.result()
        return Compiled(
            facts=TargetFacts(
                kind="cpu", name=self.name, archs=self.isas, toolchain=compiler.version
            ),
            kv=plan.kv,
            ledger=ByteLedger(
                weights=plan.weights_bytes, activations=plan.arena_bytes, page=plan.kv.page_bytes
            ),
            tables=tables_on_cpu(request.scheme, request.tables),
        )

    def _compile_isa(
        self,
        compiler: Compiler,
        source: str,
        isa: str,
        request: CompileRequest,
        children: Children,
    ) -> None:
        path = request.scratch / f"engine-{isa}.cpp"
        path.write_text(source)
        include = Path(next(iter(trtc.plugins.__path__))).resolve()
        output = request.workdir / object_file(isa)
        compiler.build(path, isa, include, output, self.optimization, children)


def parse_cpu_target(isas: str) -> CpuTarget:
    """The part of `--target` after `cpu:`; empty means the best level of this machine.

    Raises:
        UnsupportedError: an unknown level.
    """
    if not isas:
        return CpuTarget(isas=runnable_isas()[:1])
    wanted = [isa.strip() for isa in isas.split(",")]
    for isa in wanted:
        if isa not in ISAS:
            raise UnsupportedError(
                f"{isa!r} is not an instruction-set level",
                field="--target",
                remedy=f"Use one or more of {', '.join(ISAS)}, separated by commas",
            )
    return CpuTarget(isas=tuple(isa for isa in reversed(ISAS) if isa in wanted))
