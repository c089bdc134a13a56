"""`trtc eval`: an engine's perplexity on a text, and how far it is from the unquantised model; or
its scores in tasks of lm-evaluation-harness."""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from trtc.commands.measured_text import measured_text
from trtc.commands.phases import phases
from trtc.protos.errors import EnvironmentFault, RequestError
from trtc.protos.manifest import Manifest, read_manifest
from trtc.quant.accuracy import Accuracy, Float32s, Int32s, measure
from trtc.quant.calibration_text import WINDOW, TokenSet
from trtc.quant.quiet import quiet_libraries
from trtc.runtime.engine.probe import pages_of_solo, sequence_logits
from trtc.runtime.engine.session import open_session
from trtc.runtime.executors.base import Executor
from trtc.runtime.frontends.local import LocalEngine

if TYPE_CHECKING:
    from trtc.commands.harness.tasks import Tasks

_MAX_TOKENS = 16_384


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Text to measure on (.jsonl or plain). Default: held-out text that ships with trtc.",
)
@click.option(
    "--reference",
    metavar="MODEL",
    help="The unquantised checkpoint: adds KL divergence and top-1 agreement.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(2),
    help=f"Tokens to measure on, spread evenly over the text. Default: {_MAX_TOKENS}, or all of a "
    "shorter text.",
)
@click.option(
    "--window",
    type=click.IntRange(2),
    help="Tokens that are predicted from one another; at most the engine's max_seq_len. Default: "
    f"{WINDOW}.",
)
@click.option(
    "--tasks",
    metavar="NAME,...",
    help="Evaluate tasks or groups of lm-evaluation-harness instead of a text: hellaswag,arc_easy.",
)
@click.option(
    "--include-path",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory with tasks of your own, in YAML. Python functions that they name are run.",
)
@click.option(
    "--num-fewshot",
    type=click.IntRange(0),
    help="Answered examples before each question. Default: as the task has it.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    help="Questions of a task at most, the first ones. Default: all.",
)
@click.option(
    "--apply-chat-template",
    is_flag=True,
    help="Ask tasks as conversations that the model's chat template writes.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the tasks' results to a JSON file, with every question and answer.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads. Default: one a core.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    engine: Path,
    text: Path | None,
    reference: str | None,
    max_tokens: int | None,
    window: int | None,
    tasks: str | None,
    include_path: Path | None,
    num_fewshot: int | None,
    limit: int | None,
    apply_chat_template: bool,
    output: Path | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure an engine's accuracy on a text, or in tasks.

    The text is tokenised as a whole and cut into windows; in each, every token but the first is
    predicted from those before it.

    Tasks are those of EleutherAI's lm-evaluation-harness, which runs in this process (pip
    install lm-eval); most of them download their questions.
    """
    of_text = {
        "--text": text,
        "--reference": reference,
        "--max-tokens": max_tokens,
        "--window": window,
    }
    of_tasks = {
        "--include-path": include_path,
        "--num-fewshot": num_fewshot,
        "--limit": limit,
        "--apply-chat-template": apply_chat_template or None,
        "--output": output,
    }
    if tasks is None:
        _refuse_given(of_tasks, "is of tasks", "Give --tasks, or leave it out")
        _measure_text(
            engine,
            text,
            reference,
            max_tokens=max_tokens,
            window=window or WINDOW,
            threads=threads,
            as_json=as_json,
        )
        return
    _refuse_given(of_text, "is of a text, and --tasks is given", "Leave one of the two out")
    _need_lm_eval()
    from trtc.commands.harness.tasks import Tasks

    names = tuple(name for name in (part.strip() for part in tasks.split(",")) if name)
    if not names:
        raise RequestError("names no task", field="--tasks", remedy="Give one, as in hellaswag")
    _evaluate_tasks(
        engine,
        Tasks(names, include_path, num_fewshot, limit, apply_chat_template),
        output,
        threads=threads,
        as_json=as_json,
    )


def _refuse_given(options: Mapping[str, object], problem: str, remedy: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise RequestError(problem, field=option, remedy=remedy)


def _measure_text(
    engine: Path,
    text: Path | None,
    reference: str | None,
    *,
    max_tokens: int | None,
    window: int,
    threads: int | None,
    as_json: bool,
) -> None:
    manifest = read_manifest(engine)
    tokens = measured_text(
        engine,
        manifest,
        text,
        max_seq_len=manifest.limits.max_seq_len,
        max_tokens=max_tokens or _MAX_TOKENS,
        window=window,
    )
    if max_tokens is not None and tokens.num_tokens < max_tokens:
        raise RequestError(
            f"asks for {max_tokens} tokens, and the text has {tokens.num_tokens}",
            field="--max-tokens",
            remedy="Give a longer --text, or fewer tokens",
        )
    checkpoint = None if reference is None else _reference(reference)
    with phases() as progress:
        progress(f"running {tokens.num_tokens} tokens")
        accuracy = _measure(engine, manifest, tokens, checkpoint, threads)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "perplexity": accuracy.perplexity,
                    "kl": accuracy.kl,
                    "top1": accuracy.top1,
                    "tokens": accuracy.tokens,
                    "reference_perplexity": accuracy.reference_perplexity,
                    "text_sha256": tokens.sha256,
                }
            )
        )
        return
    Console().print(_table(accuracy))


def _need_lm_eval() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise EnvironmentFault(
            "needs the package lm-eval, which is not installed",
            field="--tasks",
            remedy="pip install lm-eval==0.4.13",
        )


def _evaluate_tasks(
    engine: Path, tasks: "Tasks", output: Path | None, *, threads: int | None, as_json: bool
) -> None:
    if output is not None and not output.absolute().parent.is_dir():
        raise RequestError("is in no directory", field="--output", remedy="Make it first")
    manifest = read_manifest(engine)
    with phases() as progress, quiet_libraries():
        progress("loading tasks")
        from trtc.commands.harness.engine_lm import EngineLM
        from trtc.commands.harness.tasks import evaluate_tasks, load_tasks, tables

        loaded = load_tasks(tasks)
        progress("opening the engine")
        with LocalEngine.open(
            engine, num_threads=threads, dummy_weights=manifest.dummy_weights
        ) as opened:
            model = EngineLM(opened, progress)
            results = evaluate_tasks(model, tasks, loaded, keeps_samples=output is not None)
    document = {"engine": str(engine), "digest": manifest.digest, **results}
    if output is not None:
        output.write_text(json.dumps(document, indent=2, default=_plain) + "\n", "utf-8")
        del document["configs"], document["samples"]
    if model.num_cut:
        click.echo(
            f"{model.num_cut} prompts lost their beginnings: they are longer than the engine's "
            f"{model.max_length} tokens. Build it with a larger --max-seq-len.",
            err=True,
        )
    click.echo(json.dumps(document, default=_plain) if as_json else tables(results))


def _plain(value: Any) -> Any:
    """What JSON can hold of a task's settings and rows: numbers of NumPy, names of functions."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _reference(model: str) -> Path:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise EnvironmentFault(
                f"needs the package {package}, which is not installed",
                field="--reference",
                remedy="pip install 'trtc[build]'",
            )
    from trtc.builder.checkpoint.resolve import resolve_model

    return resolve_model(model)


def _measure(
    engine: Path, manifest: Manifest, tokens: TokenSet, reference: Path | None, threads: int | None
) -> Accuracy:
    references = None
    if reference is not None:
        from trtc.quant.reference_logits import reference_logits

        references = reference_logits(reference, tokens.sequences)
    session = open_session(
        engine,
        num_threads=threads,
        num_pages=pages_of_solo(manifest.kv, manifest.limits),
        dummy_weights=manifest.dummy_weights,
    )
    try:
        found = measure(_logits(session.executor, tokens.sequences), references, tokens.sequences)
        session.raise_if_changed()
        return found
    finally:
        session.close()


def _logits(executor: Executor, sequences: tuple[Int32s, ...]) -> Iterator[Float32s]:
    for sequence in sequences:
        yield np.concatenate(list(sequence_logits(executor, sequence)))


def _table(accuracy: Accuracy) -> Table:
    table = Table(title=f"{accuracy.tokens} tokens", title_justify="left", box=None)
    table.add_column("")
    table.add_column("engine", justify="right")
    table.add_column("unquantised", justify="right")
    before = accuracy.reference_perplexity
    table.add_row(
        "perplexity", f"{accuracy.perplexity:.4f}", "" if before is None else f"{before:.4f}"
    )
    if accuracy.kl is not None and accuracy.top1 is not None:
        table.add_row("KL (nats a token)", f"{accuracy.kl:.6f}", "")
        table.add_row("top-1 agreement", f"{accuracy.top1:.2%}", "")
    return table
