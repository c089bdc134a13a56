"""A build, step by step.

    checkpoint -> quantise -> graph -> passes -> compile -> judge -> manifest -> rename

Nothing is seen under the output's name until the last step, and nothing is left if one fails.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from trtc.builder.answer_format import detected_format
from trtc.builder.checkpoint.resolve import hub_commit, resolve_model
from trtc.builder.checkpoint.tokenizer_conversion import with_fast_tokenizer
from trtc.builder.checkpoint.verify import expected_tensors
from trtc.builder.engine_size import engine_bytes
from trtc.builder.grammar_files import read_grammar_files, write_grammars
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.judge import (
    canary_tolerance,
    check_budget,
    judge_accuracy,
    make_canaries,
    window_tokens,
)
from trtc.builder.mixers import check_kv, check_mixers
from trtc.builder.package import check_output, empty, publish, seal, workspace
from trtc.builder.passes.base import run_passes
from trtc.builder.probe import EngineProbe
from trtc.builder.provenance import provenance_of
from trtc.builder.recipe_budget import Budget, find_recipes
from trtc.builder.report import Report, make_report, starved_note, write_report
from trtc.builder.report_frontier import FrontierPoint
from trtc.builder.request import BuildRequest
from trtc.builder.sbom import write_sbom
from trtc.builder.sharding import check_sharding
from trtc.builder.source import ModelSource, calibrated_source, open_source
from trtc.builder.tables import has_tied_embeddings, open_tables
from trtc.builder.targets.base import Compiled, CompileRequest, Target
from trtc.builder.targets.registry import parse_target
from trtc.builder.twin import Twin, compile_twin, seal_twin, why_no_twin
from trtc.protos.answer_formats import NONE
from trtc.protos.errors import (
    AccuracyError,
    CheckpointError,
    EnvironmentFault,
    RequestError,
    UnsupportedError,
)
from trtc.protos.files import MAX_JSON_BYTES, UnreadableError, read_file
from trtc.protos.grammars import StoredGrammar
from trtc.protos.manifest import (
    TOKENIZER_DIR,
    AccuracyFacts,
    Limits,
    Manifest,
    ModelFacts,
    Provenance,
    SchemeFacts,
    TableDType,
)
from trtc.protos.progress import Progress, Step
from trtc.protos.staging import Staging
from trtc.quant.calibration_facts import CalibrationFacts
from trtc.quant.calibration_text import TokenSet
from trtc.quant.evaluation import heldout_set
from trtc.quant.keep import parse_keep
from trtc.quant.recipe import MIXED_SCHEME, RECIPE_FILE
from trtc.quant.site_format import BF16, SiteFormat
from trtc.version import __version__


@dataclass(frozen=True)
class BuildResult:
    """An engine that is in its place."""

    path: Path
    manifest: Manifest
    report: Report
    """The report, as in report.json."""
    seconds: float


@dataclass(frozen=True)
class _Job:
    """A request, resolved and checked."""

    request: BuildRequest
    target: Target
    source: ModelSource
    probe: EngineProbe | None
    """None: nothing is measured."""
    reference: Path | None
    """The unquantised checkpoint, when there is one to measure against."""
    texts: TokenSet | None
    """What to measure on, where that needs no model to write it."""
    progress: Progress
    notes: tuple[str, ...]
    """What the user should know before the work begins."""
    commit: str | None
    """Of a model from the hub."""
    grammars: Mapping[str, StoredGrammar]
    """That the engine holds, by their names."""
    frontier: tuple[FrontierPoint, ...] = ()
    """What a search measured on the way to the source's recipe."""


def build(
    request: BuildRequest,
    *,
    probe: EngineProbe | None = None,
    progress: Progress = lambda message: None,
    notice: Callable[[str], None] = lambda note: None,
    target: Target | None = None,
) -> BuildResult:
    """Compile a checkpoint into an engine directory.

    Args:
        probe: runs the engine to measure it; None leaves accuracy and canaries out.
        notice: called before the work begins with each note that is known by then; the report has
            all notes.
        target: instead of the one that `request.target` names.

    Raises:
        UserError: the request, the checkpoint or the output is at fault; said before any work
            where it can be.
        AccuracyError: the engine missed `max_kl`.
        EnvironmentFault: this machine lacks something.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        job = _open_job(request, probe, progress, target, stack)
        for note in job.notes:
            notice(note)
        work = stack.enter_context(workspace(request.output, force=request.force))
        judged, report = _first_that_fits(_attempts(job, work), work)
        progress(Step("publishing"))
        final = publish(work, judged, force=request.force, known=judged.files)
    return BuildResult(request.output, final, report, time.monotonic() - began)


def _attempts(job: _Job, work: Staging) -> tuple[_Job, ...]:
    """What to build: the job as it is; or, with a budget, recipes for it from narrow to wide."""
    request, source = job.request, job.source
    if not _searches(request, source, job.target):
        return (job,)
    found = find_recipes(
        source.checkpoint.path,
        request.calib,
        job.texts,
        Budget(request.max_bits, request.max_bytes, request.max_kl),
        engine_bytes(request, source, job.target),
        open_tables(source.spec, source.tables),
        work.journal,
        job.progress,
    )
    return tuple(
        replace(job, frontier=one.frontier, source=source.following(one.recipe)) for one in found
    )


def _searches(request: BuildRequest, source: ModelSource, target: Target) -> bool:
    """Whether the build is to find a recipe."""
    if request.has_size:
        return True
    is_open = request.dtype is None and source.recipe is None and source.quantization is None
    return is_open and request.max_kl is not None and _takes_recipes(target)


def _check_search(request: BuildRequest, target: Target, source: ModelSource) -> None:
    """Refuse a budget that no recipe could be built for."""
    if source.quantization is not None:
        raise RequestError(
            "the checkpoint is quantised already",
            field="--max-bits" if request.max_bits is not None else "--max-bytes",
            remedy="Leave it out, or give the unquantised checkpoint",
        )
    target.check(MIXED_SCHEME)
    _check_ranks(request, target, replace(source, scheme=MIXED_SCHEME))


def _check_tables(target: Target) -> None:
    if not _takes_recipes(target):
        raise UnsupportedError(
            f"{target.name} keeps the lm_head and the embeddings in the type of activations",
            field="--lm-head-dtype, --embedding-dtype",
            remedy="Leave them out, or use --target cpu or cuda",
        )


def _takes_recipes(target: Target) -> bool:
    try:
        target.check_scheme(MIXED_SCHEME)
    except UnsupportedError:
        return False
    return True


def _first_that_fits(attempts: Sequence[_Job], work: Staging) -> tuple[Manifest, Report]:
    """Build one after the other until one keeps to `max_kl`."""
    for attempt in attempts[:-1]:
        try:
            return _make(attempt, work)
        except AccuracyError as error:
            attempt.progress(Step(f"{error.problem}: trying a wider recipe"))
            empty(work)
    return _make(attempts[-1], work)


def _make(job: _Job, work: Staging) -> tuple[Manifest, Report]:
    """Everything of an engine but its place, in the order in which it is made.

    Raises:
        AccuracyError: it missed `max_kl`.
    """
    checkpoint = job.source.checkpoint.path
    calibration = _calibrate(job, work)
    if calibration is not None:
        job = replace(job, source=calibrated_source(job.source, work.scratch / "quantized"))
    draft = _draft(job, work)
    compiled = _compile(job, draft)
    job.progress(Step("hashing the checkpoint"))
    provenance = provenance_of(job.request, checkpoint, compiled.facts.kind)
    _check_bytes(job.request, compiled)
    twin = _compile_twin(job, draft, compiled)
    job.source.release()
    _copy_tokenizer(job.source, work.new)
    if job.source.recipe is not None:
        (work.new / RECIPE_FILE).write_bytes(job.source.recipe.to_json())
    write_grammars(work.new, job.grammars)
    unsealed = _manifest(job, calibration, compiled, provenance)
    write_sbom(work.new, unsealed.model, unsealed.target, provenance)
    manifest = seal(work.new, unsealed)
    if twin is not None:
        seal_twin(twin, manifest)
    judged = _judge(job, work, twin, manifest, calibration)
    notes = _notes(job, calibration, compiled, judged.accuracy)
    report = make_report(judged, calibration, notes, job.frontier)
    write_report(report, work.new)
    return judged, report


def _check_bytes(request: BuildRequest, compiled: Compiled) -> None:
    """Hold the engine against a budget that a search met by its plan."""
    most, taken = request.max_bytes, compiled.ledger.weights
    if most is not None and taken > most:
        raise AccuracyError(
            f"the engine's weights take {taken:,} bytes",
            field="--max-bytes",
            remedy=f"Give {taken} or more",
        )


def _open_job(
    request: BuildRequest,
    probe: EngineProbe | None,
    progress: Progress,
    target: Target | None,
    stack: ExitStack,
) -> _Job:
    """Raises every error that can be found before the work. `stack` removes what the job has
    made."""
    request.check()
    target = parse_target(request.target) if target is None else target
    check_output(request.output, force=request.force)
    progress(Step(f"reading {request.model}"))
    weights = not request.dummy_weights
    # Once: a branch may move, and the answers may take seconds.
    found = resolve_model(request.model, request.revision, weights=weights)
    model = stack.enter_context(with_fast_tokenizer(found))
    source = open_source(replace(request, model=str(model), revision=None)).for_target(
        rounds_rows=target.rounds_rows, multiplies_fp4=target.multiplies_fp4
    )
    check_mixers(source.spec, target)
    check_kv(source.spec, source.kv_dtype, target)
    _check_ranks(request, target, source)
    for scheme in source.schemes:
        target.check(scheme)
    if any(name != BF16.name for name in source.tables.names.values()):
        _check_tables(target)
    if _searches(request, source, target):
        _check_search(request, target, source)
    tried = _try_tokenizer(source, probe)
    grammars = _grammars(request, source, probe)
    reference = _reference(request, source)
    unmeasured = _why_unmeasured(request, target, source, probe)
    if unmeasured:
        probe = None
    if request.max_kl is not None and probe is None:
        raise EnvironmentFault(
            f"cannot be measured: {unmeasured}",
            field="--max-kl",
            remedy=f"Build on a machine that runs {target.name}, or leave --max-kl out",
        )
    if request.max_kl is not None and reference is None:
        raise RequestError(
            "cannot be measured: the checkpoint came quantised",
            field="--max-kl",
            remedy="Give the unquantised checkpoint with --reference",
        )
    texts = None if probe is None else _texts(request, source, reference)
    notes = (*_early_notes(request, source, unmeasured), *tried)
    commit = hub_commit(found)
    return _Job(request, target, source, probe, reference, texts, progress, notes, commit, grammars)


def _try_tokenizer(source: ModelSource, probe: EngineProbe | None) -> tuple[str, ...]:
    """Before the first use here, which has no limits."""
    if probe is None or not source.checkpoint.has_tokenizer:
        return ()
    return probe.check_tokenizer(source.checkpoint.path)


def _grammars(
    request: BuildRequest, source: ModelSource, probe: EngineProbe | None
) -> Mapping[str, StoredGrammar]:
    """The grammars of the request, each of which has been compiled."""
    if not request.grammars:
        return {}
    first = request.grammars[0].field
    if not source.checkpoint.has_tokenizer:
        raise RequestError("the checkpoint has no tokenizer", field=first, remedy="Leave it out")
    if probe is None:
        raise EnvironmentFault(
            "there is nothing to compile it with", field=first, remedy="Leave it out"
        )
    grammars = read_grammar_files(request.grammars)
    try:
        probe.check_grammars(source.checkpoint.path, source.spec.vocab_size, grammars)
    except RequestError as error:
        (wrong,) = [one.field for one in request.grammars if one.name == error.field]
        raise RequestError(error.problem, field=wrong, remedy=error.remedy) from error
    return grammars


def _why_unmeasured(
    request: BuildRequest, target: Target, source: ModelSource, probe: EngineProbe | None
) -> str:
    if request.dummy_weights:
        return "the engine has no weights"
    if request.eval_tokens == 0:
        return "--eval-tokens is 0"
    if probe is None:
        return "there is nothing to run an engine with"
    if _measures_itself(request, target):
        return ""
    why = why_no_twin(source.scheme)
    return why and f"this machine does not run {target.name}, and {why}"


def _measures_itself(request: BuildRequest, target: Target) -> bool:
    """Whether the engine is run, not its twin; one of several ranks is not an engine."""
    return target.runs_here and request.tp == 1


def _check_ranks(request: BuildRequest, target: Target, source: ModelSource) -> None:
    if request.tp > target.max_ranks:
        raise RequestError(
            f"is {request.tp}, and {target.name} takes at most {target.max_ranks}",
            field="--tp",
            remedy="Leave it out, or build with --target cuda:sm_90",
        )
    check_sharding(source.spec, source.scheme, source.quantization, request.tp, ep=request.ep)


def _texts(request: BuildRequest, source: ModelSource, reference: Path | None) -> TokenSet | None:
    """What to measure on; None where the model itself has to write it."""
    if request.eval_text is None and not source.checkpoint.has_tokenizer:
        return None
    return _heldout(request, source, reference)


def _heldout(request: BuildRequest, source: ModelSource, reference: Path | None) -> TokenSet:
    return heldout_set(
        source.checkpoint.path if source.checkpoint.has_tokenizer or not reference else reference,
        source.spec.vocab_size,
        window_tokens(source.spec.vocab_size, source.max_seq_len),
        request.eval_text,
        tokens=request.eval_tokens,
    )


def _reference(request: BuildRequest, source: ModelSource) -> Path | None:
    if request.dummy_weights:
        return None
    if request.reference is not None:
        return resolve_model(request.reference)
    return source.checkpoint.path if source.quantization is None else None


def _calibrate(job: _Job, work: Staging) -> CalibrationFacts | None:
    """Quantise into a checkpoint of its own, unless there is nothing to quantise."""
    if not job.source.needs_calibration:
        return None
    from trtc.quant.calibrate import quantize_checkpoint

    return quantize_checkpoint(
        job.source.checkpoint.path,
        job.source.recipe or job.source.scheme,
        job.source.kv_dtype,
        job.request.calib,
        work.scratch / "quantized",
        job.progress,
        job.texts,
        parse_keep(job.request.keep),
        work.journal,
    )


def _draft(job: _Job, work: Staging) -> CompileRequest:
    """Write the graph, which no pass has rewritten yet."""
    request, source = job.request, job.source
    limits = _limits(job)
    job.progress(Step("writing the graph"))
    graph_request = GraphRequest(
        source.scheme,
        source.kv_dtype,
        limits,
        source.quantization,
        request.page_size,
        window_groups=job.target.window_groups,
    )
    return CompileRequest(
        module=build_graph(source.spec, graph_request, source.reader),
        reader=source.reader,
        scheme=source.scheme,
        limits=limits,
        exact_activations=request.exact_activations,
        tables=source.tables,
        exact_weights=request.exact_weights,
        dummy_weights=request.dummy_weights,
        workdir=work.new,
        scratch=work.scratch,
        ranks=request.tp,
        ep=request.ep,
    )


def _compile(job: _Job, draft: CompileRequest) -> Compiled:
    """Rewrite the graph for the target, and let the target lower it."""
    job.progress(Step("rewriting the graph"))
    module, _ = run_passes(draft.module, job.target.passes(draft))
    return job.target.compile(replace(draft, module=module), job.progress)


def _compile_twin(job: _Job, draft: CompileRequest, compiled: Compiled) -> Twin | None:
    """What is measured in the engine's place; None when the engine is, or nothing."""
    if job.probe is None or _measures_itself(job.request, job.target):
        return None
    job.progress(Step(f"making the CPU twin of {job.target.name} to measure it with"))
    return compile_twin(replace(draft, workdir=draft.scratch / "twin"), compiled, job.progress)


def _limits(job: _Job) -> Limits:
    return Limits(
        max_batch_size=job.request.max_batch_size,
        max_seq_len=job.source.max_seq_len,
        max_num_tokens=job.request.max_num_tokens,
        rope_switch=job.source.spec.rope_switch,
    )


def _copy_tokenizer(source: ModelSource, engine: Path) -> None:
    if not source.checkpoint.has_tokenizer:
        return
    (engine / TOKENIZER_DIR).mkdir()
    for path in source.checkpoint.tokenizer_files:
        try:
            content = read_file(path, MAX_JSON_BYTES)
        except UnreadableError as error:
            raise CheckpointError(str(error), field=str(path)) from error
        copy = engine / TOKENIZER_DIR / path.relative_to(source.checkpoint.path)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(content)


def _manifest(
    job: _Job,
    calibration: CalibrationFacts | None,
    compiled: Compiled,
    provenance: Provenance,
) -> Manifest:
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
            sampling_defaults=source.checkpoint.sampling_defaults,
            revision=job.commit,
        ),
        scheme=SchemeFacts(
            name=source.scheme.name,
            kv_dtype=source.kv_dtype,
            source="inline"
            if calibration is not None or source.quantization is None
            else source.quantization.source,
            exact_activations=job.request.exact_activations,
            exact_weights=job.request.exact_weights,
            **_tables(source, compiled),
            calibration_sha256=calibration.sha256 if calibration is not None else None,
            kept=calibration.kept if calibration is not None else (),
            formats={} if source.recipe is None else source.recipe.names,
        ),
        target=compiled.facts,
        kv=compiled.kv,
        limits=_limits(job),
        ledger=compiled.ledger,
        has_tokenizer=source.checkpoint.has_tokenizer,
        answer_format=_answer_format(job),
        dummy_weights=job.request.dummy_weights,
        provenance=provenance,
        files={},
    )


def _tables(source: ModelSource, compiled: Compiled) -> dict[str, TableDType]:
    """The manifest's facts of the lm_head and the embeddings."""

    def told(one: SiteFormat | None) -> TableDType:
        if one is None or not one.is_quantized:
            return source.scheme.dtype
        return one.weight if one.weight in ("i8", "i6") else one.name  # type: ignore[return-value]

    head, embedding = compiled.tables.lm_head, compiled.tables.embedding
    is_tied = has_tied_embeddings(source.spec)
    return {"lm_head": told(head), "embedding": told(head if is_tied else embedding)}


def _answer_format(job: _Job) -> str | msgspec.UnsetType:
    """None is not written, so that engines without a format are as they always were."""
    found = job.request.answer_format or detected_format(job.source.checkpoint.tokenizer_files)
    return msgspec.UNSET if found == NONE else found


def _judge(
    job: _Job,
    work: Staging,
    twin: Twin | None,
    manifest: Manifest,
    calibration: CalibrationFacts | None,
) -> Manifest:
    """Run the engine under construction, or its twin: what did quantisation cost, and which tokens
    does it give?"""
    if job.probe is None:
        return manifest
    source, texts = job.source, job.texts
    if texts is None and job.reference is not None:
        job.progress(Step("letting the model write held-out text"))
        texts = _heldout(job.request, source, job.reference)
    if texts is None:
        return manifest
    subject, name = (twin.path, twin.name) if twin else (work.new, job.target.name)
    accuracy = judge_accuracy(
        job.probe,
        subject,
        texts,
        job.reference,
        calibration.layers if calibration is not None else (),
        name,
        work.scratch,
        job.progress,
    )
    check_budget(accuracy, job.request.max_kl)
    job.progress(Step("recording canaries"))
    is_exact = twin is None and manifest.target.kind == "cpu"
    tolerance = 0.0 if is_exact else canary_tolerance(source.scheme, source.kv_dtype)
    canaries = make_canaries(job.probe, subject, texts.sequences, source.max_seq_len, tolerance)
    return msgspec.structs.replace(
        manifest, accuracy=accuracy, canaries=canaries, canary_tolerance=tolerance
    )


def _early_notes(request: BuildRequest, source: ModelSource, unmeasured: str) -> tuple[str, ...]:
    """What is known before the work begins."""
    notes = []
    longest = source.spec.max_position_embeddings
    if request.max_seq_len is None and source.max_seq_len < longest:
        notes.append(
            f"sequences are limited to {source.max_seq_len:,} of the model's {longest:,} tokens; "
            f"--max-seq-len {longest} keeps them all"
        )
    unknown = source.unknown_tensors
    if unknown:
        more = "" if len(unknown) <= 3 else f" and {len(unknown) - 3} more"
        notes.append(f"tensors that the model does not use: {', '.join(unknown[:3])}{more}")
    if source.quantization is not None:
        notes += source.quantization.notes
    if not source.checkpoint.has_tokenizer:
        notes.append("the checkpoint has no tokenizer: the engine takes token ids only")
    if unmeasured and not request.dummy_weights:
        notes.append(f"accuracy is not measured: {unmeasured}")
    return tuple(notes)


def _notes(
    job: _Job,
    calibration: CalibrationFacts | None,
    compiled: Compiled,
    accuracy: AccuracyFacts | None,
) -> tuple[str, ...]:
    notes = [*job.notes, *compiled.notes]
    if calibration is not None and calibration.starved_experts:
        notes.append(starved_note(calibration.starved_experts))
    calibrated_on = None if calibration is None else calibration.sha256
    if accuracy is not None and accuracy.text_sha256 == calibrated_on:
        notes.append("accuracy was measured on the calibration text, which flatters it")
    return tuple(notes)
