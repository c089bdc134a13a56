"""`trtc eval`: an engine's perplexity on a text, and how far it is from the unquantised model."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

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
from trtc.runtime.engine.probe import pages_of_solo, sequence_logits
from trtc.runtime.engine.session import open_session
from trtc.runtime.executors.base import Executor

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
    default=WINDOW,
    show_default=True,
    help="Tokens that are predicted from one another; at most the engine's max_seq_len.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads. Default: one a core.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    engine: Path,
    text: Path | None,
    reference: str | None,
    max_tokens: int | None,
    window: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure an engine's accuracy on a text.

    The text is tokenised as a whole and cut into windows; in each, every token but the first is
    predicted from those before it.
    """
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
        from trtc.quant.reference_model import reference_logits

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
