"""The story of a build, top to bottom.

    checkpoint -> quantise -> graph -> passes -> compile -> judge -> manifest -> rename

Nothing is seen under the output's name until the last step, and nothing is left if one fails.
"""

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from trtc.builder.checkpoint.resolve import resolve_model
from trtc.builder.checkpoint.verify import expected_tensors
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.judge import check_budget, judge_accuracy, make_canaries, window_tokens
from trtc.builder.package import Workspace, check_output, publish, seal, workspace
from trtc.builder.passes.base import run_passes
from trtc.builder.probe import EngineProbe
from trtc.builder.report import Report, make_report, write_report
from trtc.builder.request import BuildRequest
from trtc.builder.sharding import check_sharding
from trtc.builder.source import ModelSource, calibrated_source, open_source
from trtc.builder.targets.base import Compiled, CompileRequest, Target
from trtc.builder.targets.registry import parse_target
from trtc.protos.errors import EnvironmentFault, RequestError
from trtc.protos.manifest import (
    TOKENIZER_DIR,
    Limits,
    Manifest,
    ModelFacts,
    SchemeFacts,
)
from trtc.quant.calibrate import CalibrationFacts, quantize_checkpoint
from trtc.quant.evaluation import heldout_set
from trtc.version import __version__

Progress = Callable[[str], None]
"""Called with what is being done now."""


@dataclass(frozen=True)
class BuildResult:
    """An engine that is in its place."""

    path: Path
    manifest: Manifest
    report: Report
    """What it cost and what came of it, as in report.json."""
    seconds: float


@dataclass(frozen=True)
class _Job:
    """A request with what has been found out about it."""

    request: BuildRequest
    target: Target
    source: ModelSource
    probe: EngineProbe | None
    """None: the engine is not measured."""
    reference: Path | None
    """The unquantised checkpoint, when there is one to measure against."""
    progress: Progress


def build(
    request: BuildRequest,
    *,
    probe: EngineProbe | None = None,
    progress: Progress = lambda message: None,
    target: Target | None = None,
) -> BuildResult:
    """Compile a checkpoint into an engine directory.

    Args:
        probe: runs the engine to measure it; None leaves accuracy and canaries out.
        target: instead of the one that `request.target` names.

    Raises:
        UserError: the request, the checkpoint or the output is at fault; said before any work
            where it can be.
        AccuracyError: the engine missed `max_kl`.
        EnvironmentFault: this machine lacks something.
    """
    began = time.monotonic()
    job = _open_job(request, probe, progress, target)
    with workspace(request.output, force=request.force) as work:
        calibration = _calibrate(job, work)
        if calibration is not None:
            job = replace(job, source=calibrated_source(job.source, work.scratch / "quantized"))
        compiled = _compile(job, work)
        job.source.release()
        _copy_tokenizer(job.source, work.engine)
        manifest = seal(work.engine, _manifest(job, calibration, compiled))
        judged = _judge(job, work, manifest, calibration)
        notes = _notes(job, calibration, compiled)
        report = make_report(judged, calibration, notes)
        write_report(report, work.engine)
        progress("publishing")
        final = publish(work, judged, force=request.force, known=manifest.files)
    return BuildResult(request.output, final, report, time.monotonic() - began)


def _open_job(
    request: BuildRequest,
    probe: EngineProbe | None,
    progress: Progress,
    target: Target | None,
) -> _Job:
    """Everything that can be refused is refused here."""
    request.check()
    target = parse_target(request.target) if target is None else target
    check_output(request.output, force=request.force)
    progress(f"reading {request.model}")
    source = open_source(request)
    target.check(source.scheme)
    _check_ranks(request, target, source)
    reference = _reference(request, source)
    if not target.runs_here or request.dummy_weights:
        probe = None
    if request.max_kl is not None and probe is None:
        raise EnvironmentFault(
            f"cannot be measured: this machine does not run {target.name}",
            field="--max-kl",
            remedy="Build on a machine that does, or leave --max-kl out",
        )
    if request.max_kl is not None and reference is None:
        raise RequestError(
            "cannot be measured: the checkpoint came quantised",
            field="--max-kl",
            remedy="Give the unquantised checkpoint with --reference",
        )
    return _Job(request, target, source, probe, reference, progress)


def _check_ranks(request: BuildRequest, target: Target, source: ModelSource) -> None:
    if request.tp > target.max_ranks:
        raise RequestError(
            f"is {request.tp}, and {target.name} takes at most {target.max_ranks}",
            field="--tp",
            remedy="Leave it out, or build with --target cuda:sm_90",
        )
    check_sharding(source.spec, source.scheme, source.quantization, request.tp)


def _reference(request: BuildRequest, source: ModelSource) -> Path | None:
    if request.dummy_weights:
        return None
    if request.reference is not None:
        return resolve_model(request.reference)
    return source.checkpoint.path if source.quantization is None else None


def _calibrate(job: _Job, work: Workspace) -> CalibrationFacts | None:
    """Quantise into a checkpoint of its own, unless there is nothing to quantise."""
    if not job.source.needs_calibration:
        return None
    return quantize_checkpoint(
        job.source.checkpoint.path,
        job.source.scheme,
        job.source.kv_dtype,
        job.request.calib,
        work.scratch / "quantized",
        job.progress,
    )


def _compile(job: _Job, work: Workspace) -> Compiled:
    """Write the graph, rewrite it for the target, and let the target lower it."""
    request, source = job.request, job.source
    limits = _limits(job)
    job.progress("writing the graph")
    graph_request = GraphRequest(
        source.scheme, source.kv_dtype, limits, source.quantization, request.page_size
    )
    draft = CompileRequest(
        module=build_graph(source.spec, graph_request, source.reader),
        reader=source.reader,
        scheme=source.scheme,
        limits=limits,
        exact_activations=request.exact_activations,
        exact_lm_head=request.exact_lm_head,
        dummy_weights=request.dummy_weights,
        workdir=work.engine,
        scratch=work.scratch,
        ranks=request.tp,
    )
    job.progress("rewriting the graph")
    module, _ = run_passes(draft.module, job.target.passes(draft))
    return job.target.compile(replace(draft, module=module), job.progress)


def _limits(job: _Job) -> Limits:
    return Limits(
        max_batch_size=job.request.max_batch_size,
        max_seq_len=job.source.max_seq_len,
        max_num_tokens=job.request.max_num_tokens,
    )


def _copy_tokenizer(source: ModelSource, engine: Path) -> None:
    if not source.checkpoint.has_tokenizer:
        return
    (engine / TOKENIZER_DIR).mkdir()
    for path in source.checkpoint.tokenizer_files:
        shutil.copyfile(path, engine / TOKENIZER_DIR / path.name)


def _manifest(job: _Job, calibration: CalibrationFacts | None, compiled: Compiled) -> Manifest:
    """What is known before the engine has run."""
    source, spec = job.source, job.source.spec
    shapes = expected_tensors(spec).values()
    return Manifest(
        trtc_version=__version__,
        model=ModelFacts(
            name=source.checkpoint.name,
            family=spec.family,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            num_layers=len(spec.layers),
            num_parameters=sum(math.prod(shape) for shape in shapes),
            max_position_embeddings=spec.max_position_embeddings,
            bos_token_id=spec.bos_token_id,
            eos_token_ids=spec.eos_token_ids,
            pad_token_id=spec.pad_token_id,
        ),
        scheme=SchemeFacts(
            name=source.scheme.name,
            kv_dtype=source.kv_dtype,
            source="inline"
            if calibration is not None or source.quantization is None
            else source.quantization.source,
            exact_activations=job.request.exact_activations,
            lm_head=compiled.lm_head or source.scheme.dtype,
            calibration_sha256=calibration.sha256 if calibration is not None else None,
        ),
        target=compiled.facts,
        kv=compiled.kv,
        limits=_limits(job),
        ledger=compiled.ledger,
        has_tokenizer=source.checkpoint.has_tokenizer,
        dummy_weights=job.request.dummy_weights,
        files={},
    )


def _judge(
    job: _Job, work: Workspace, manifest: Manifest, calibration: CalibrationFacts | None
) -> Manifest:
    """Run the engine under construction: what did it cost, and what does it say?"""
    if job.probe is None:
        return manifest
    source = job.source
    texts = None
    if job.reference is not None or source.checkpoint.has_tokenizer:
        job.progress("choosing held-out text")
        texts = heldout_set(
            job.reference or source.checkpoint.path,
            source.spec.vocab_size,
            window_tokens(source.spec.vocab_size, source.max_seq_len),
        )
    if texts is None:
        return manifest
    job.progress(f"measuring accuracy on {texts.num_tokens} held-out tokens")
    accuracy = judge_accuracy(
        job.probe,
        work.engine,
        texts,
        job.reference,
        calibration.layers if calibration is not None else (),
        job.target.name,
        work.scratch,
    )
    check_budget(accuracy, job.request.max_kl)
    job.progress("recording canaries")
    canaries = make_canaries(job.probe, work.engine, texts.sequences, source.max_seq_len)
    return msgspec.structs.replace(manifest, accuracy=accuracy, canaries=canaries)


def _notes(job: _Job, calibration: CalibrationFacts | None, compiled: Compiled) -> tuple[str, ...]:
    notes = list(compiled.notes)
    unknown = job.source.unknown_tensors
    if unknown:
        more = "" if len(unknown) <= 3 else f" and {len(unknown) - 3} more"
        notes.append(f"tensors that the model does not use: {', '.join(unknown[:3])}{more}")
    if job.source.quantization is not None:
        notes += job.source.quantization.notes
    if calibration is not None and calibration.starved_experts:
        starved = len(calibration.starved_experts)
        notes.append(
            f"experts that the calibration text hardly reached: {starved}; "
            "they were calibrated on all tokens of their layer"
        )
    if not job.source.checkpoint.has_tokenizer:
        notes.append("the checkpoint has no tokenizer: the engine takes token ids only")
    if not job.target.runs_here:
        notes.append(f"this machine does not run {job.target.name}: accuracy was not measured")
    return tuple(notes)
