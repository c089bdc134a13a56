"""`trtc compare`: where two engines of one model part, by token, position and layer."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click
import numpy as np

from trtc.builder.comparison_page import (
    ComparisonReport,
    ShownContinuation,
    ShownSplit,
    comparison_html,
)
from trtc.commands.comparison_tables import print_comparison
from trtc.commands.measured_text import measured_text
from trtc.commands.phases import phases
from trtc.protos.errors import RequestError
from trtc.protos.manifest import TOKENIZER_DIR, Manifest, read_manifest
from trtc.quant.calibration_text import TokenSet
from trtc.quant.comparison import Continuation, Split, compare, continuation, layer_pairs
from trtc.runtime.engine.probe import greedy_with_margins, pages_of_solo, sequence_logits
from trtc.runtime.engine.session import Session, open_session
from trtc.runtime.executors.base import Executor, Float32s, Int32s
from trtc.runtime.text.tokenizer import TOKENIZER_FILE, Tokenizer
from trtc.version import __version__

_MAX_TOKENS = 4096
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 8, 32, 64
_SHOWN_TOKENS = 12
"""Of what comes before a token that is shown."""
_Pair = tuple[Session, Session]


@click.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Text to compare on (.jsonl or plain). Default: held-out text that ships with trtc.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(2),
    default=_MAX_TOKENS,
    show_default=True,
    help="Tokens to compare on at most, spread evenly over the text.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads. Default: one a core.")
@click.option(
    "--page", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML page too."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    first: Path,
    second: Path,
    text: Path | None,
    max_tokens: int,
    threads: int | None,
    page: Path | None,
    as_json: bool,
) -> None:
    """Say where two engines of one model part.

    Both engines are given the same text, and then continue the beginnings of some of it greedily.
    """
    if page is not None and not page.absolute().parent.is_dir():
        raise RequestError("is in no directory", field="--page", remedy="Make it first")
    manifests = read_manifest(first), read_manifest(second)
    _check_alike((first, second), manifests)
    longest = min(one.limits.max_seq_len for one in manifests)
    tokens = measured_text(first, manifests[0], text, max_seq_len=longest, max_tokens=max_tokens)
    with phases() as progress, ExitStack() as stack:
        progress("opening the engines")
        sessions = (
            _open(stack, first, manifests[0], threads),
            _open(stack, second, manifests[1], threads),
        )
        progress(f"running {tokens.num_tokens} tokens")
        report = _report((first, second), sessions, tokens, progress)
        for session in sessions:
            session.raise_if_changed()
    if page is not None:
        _write_page(page, report)
    if as_json:
        click.echo(json.dumps(_document(report)))
        return
    print_comparison(report)


def _check_alike(engines: tuple[Path, Path], manifests: tuple[Manifest, Manifest]) -> None:
    """Check that a token means the same in both.

    Raises:
        RequestError: it does not.
    """
    first, second = manifests
    if first.model.vocab_size != second.model.vocab_size:
        raise RequestError(
            f"has {second.model.vocab_size} tokens, and that of {engines[0]} "
            f"{first.model.vocab_size}",
            field=f"{engines[1]}: vocabulary",
            remedy="Compare engines of one model",
        )
    file = f"{TOKENIZER_DIR}/{TOKENIZER_FILE}"
    hashes = [one.files[file].sha256 for one in manifests if file in one.files]
    if len(set(hashes)) > 1:
        raise RequestError(
            f"is not the one of {engines[0]}",
            field=f"{engines[1]}: {file}",
            remedy="Compare engines of one model",
        )


def _open(stack: ExitStack, engine: Path, manifest: Manifest, threads: int | None) -> Session:
    session = open_session(
        engine,
        num_threads=threads,
        num_pages=pages_of_solo(manifest.kv, manifest.limits),
        dummy_weights=manifest.dummy_weights,
    )
    return stack.enter_context(closing(session))


def _report(
    engines: tuple[Path, Path],
    sessions: _Pair,
    tokens: TokenSet,
    progress: Callable[[str], None],
) -> ComparisonReport:
    first, second = (session.executor for session in sessions)
    found = compare(
        _logits(first, tokens.sequences), _logits(second, tokens.sequences), tokens.sequences
    )
    progress(f"continuing {min(_PROMPTS, len(tokens.sequences))} prompts")
    prompts = [
        [int(token) for token in sequence[:_PROMPT_TOKENS]]
        for sequence in tokens.sequences[:_PROMPTS]
    ]
    continuations = [
        continuation(
            number,
            greedy_with_margins(first, prompt, _NEW_TOKENS),
            greedy_with_margins(second, prompt, _NEW_TOKENS),
        )
        for number, prompt in enumerate(prompts)
    ]
    shown = _Texts(sessions[0].tokenizer)
    manifests = sessions[0].manifest, sessions[1].manifest
    recorded = [one.accuracy.layers if one.accuracy else () for one in manifests]
    return ComparisonReport(
        names=_names(engines),
        manifests=manifests,
        text=tokens.source,
        comparison=found,
        splits=tuple(shown.split(one, tokens.sequences) for one in found.splits),
        continuations=tuple(shown.continuation(one, prompts[one.prompt]) for one in continuations),
        layers=layer_pairs(recorded[0], recorded[1]),
    )


def _logits(executor: Executor, sequences: Sequence[Int32s]) -> Iterator[Float32s]:
    for sequence in sequences:
        yield np.concatenate(list(sequence_logits(executor, sequence)))


def _names(engines: tuple[Path, Path]) -> tuple[str, str]:
    """The directories' own names, or where these are the same, their paths."""
    first, second = (engine.resolve() for engine in engines)
    if first.name != second.name:
        return first.name, second.name
    return str(engines[0]), str(engines[1])


class _Texts:
    """Tokens as text, or as their numbers where an engine has no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def of(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(str(token) for token in token_ids)
        return repr(self._tokenizer.decode(token_ids, skip_special=False))[1:-1]

    def split(self, one: Split, sequences: Sequence[Int32s]) -> ShownSplit:
        begin = max(0, one.position - _SHOWN_TOKENS)
        before = sequences[one.sequence][begin : one.position]
        return ShownSplit(
            before=self.of([int(token) for token in before]),
            token=self.of([one.token]),
            choices=(self.of([one.choices[0]]), self.of([one.choices[1]])),
            kl=one.kl,
        )

    def continuation(self, one: Continuation, prompt: Sequence[int]) -> ShownContinuation:
        choices = one.choices
        return ShownContinuation(
            prompt=self.of(prompt[-_SHOWN_TOKENS:]),
            agreed=self.of(one.agreed[-_SHOWN_TOKENS:]),
            choices=None if choices is None else (self.of([choices[0]]), self.of([choices[1]])),
            found=one,
        )


def _write_page(page: Path, report: ComparisonReport) -> None:
    try:
        page.write_text(comparison_html(report, __version__), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot be written: {error.strerror}", field="--page") from error


def _document(report: ComparisonReport) -> dict[str, Any]:
    """The --json document."""
    found = report.comparison
    return {
        "engines": list(report.names),
        "text": report.text,
        **dataclasses.asdict(found),
        "continuations": [dataclasses.asdict(one.found) for one in report.continuations],
        "layers": [dataclasses.asdict(one) for one in report.layers],
    }
