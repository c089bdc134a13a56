"""The CPU twin of an engine that this machine cannot run: the same graph, compiled for this CPU.

The twin computes what the engine's graph says, from the same quantised weights and with the same KV
type, and differs from the engine by rounding alone. A build measures it in the engine's place. It
is written to the build's workspace, and its weights are mapped into memory.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from trtc.builder.package import seal
from trtc.builder.passes.base import run_passes
from trtc.builder.targets.base import Compiled, CompileRequest
from trtc.builder.targets.cpu import CpuTarget, parse_cpu_target
from trtc.protos.errors import EnvironmentFault, UnsupportedError
from trtc.protos.manifest import Manifest
from trtc.protos.progress import Progress
from trtc.quant.scheme import Scheme
from trtc.quant.site_format import BF16, TableFormats


@dataclass(frozen=True)
class Twin:
    """A compiled twin, which `seal_twin` makes an engine that a probe can open."""

    path: Path
    name: str
    """For `AccuracyFacts.measured_on`: `cpu:x86-64-v3 twin`."""
    compiled: Compiled


def why_no_twin(scheme: Scheme) -> str:
    """Why this machine cannot make a twin of an engine of `scheme`; "" when it can."""
    try:
        _target().check(scheme)
    except (EnvironmentFault, UnsupportedError) as error:
        return f"a CPU twin cannot be built ({error.problem})"
    return ""


def compile_twin(draft: CompileRequest, compiled: Compiled, progress: Progress) -> Twin:
    """Compile the twin of an engine into `draft.workdir`, which is made.

    Args:
        draft: the engine's request with the graph that no pass has rewritten, of one rank.
        compiled: the engine, whose tables the twin's are to equal.

    Raises:
        EnvironmentFault: the C++ compiler fails.
    """
    target = _target()
    # A CPU engine for other machines keeps its own rounding; GPUs compute with exact operands.
    is_gpu = compiled.facts.kind != "cpu"
    request = replace(
        draft,
        exact_activations=draft.exact_activations or is_gpu,
        exact_weights=draft.exact_weights or is_gpu,
        tables=TableFormats(compiled.tables.lm_head or BF16, compiled.tables.embedding or BF16),
        ranks=1,
    )
    request.workdir.mkdir()
    module, _ = run_passes(request.module, target.passes(request))
    twin = target.compile(replace(request, module=module), progress)
    return Twin(request.workdir, f"{target.name} twin", twin)


def seal_twin(twin: Twin, manifest: Manifest) -> None:
    """Write the twin's manifest: that of the engine, with what differs."""
    seal(
        twin.path,
        msgspec.structs.replace(
            manifest,
            target=twin.compiled.facts,
            kv=twin.compiled.kv,
            ledger=twin.compiled.ledger,
            has_tokenizer=False,
            files={},
        ),
    )


def _target() -> CpuTarget:
    """The best instruction-set level of this machine."""
    return parse_cpu_target("")
