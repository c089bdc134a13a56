"""Grammars that an engine is built with: the files of `--grammar`, and what the engine holds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from trtc.protos.errors import RequestError
from trtc.protos.files import UnreadableError, read_file
from trtc.protos.grammars import (
    GRAMMARS_FILE,
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMARS,
    NAME_PATTERN,
    TOKENIZER_JSON,
    StoredGrammar,
    StoredGrammars,
    StoredKind,
)
from trtc.protos.record import record_json
from trtc.quant.hashing import file_facts

_OPTION = "--grammar"
_KINDS: tuple[StoredKind, ...] = get_args(StoredKind)
_OF_SUFFIX: Mapping[str, StoredKind] = {
    ".json": "json_schema",
    ".lark": "lark",
    ".gbnf": "lark",
    ".ebnf": "lark",
    ".regex": "regex",
}


@dataclass(frozen=True)
class GrammarFile:
    """One `--grammar`."""

    name: str
    kind: StoredKind
    path: Path

    def __str__(self) -> str:
        return f"{self.name}={self.kind}:{self.path.name}"

    @property
    def field(self) -> str:
        """Of errors."""
        return f"{_OPTION} {self.name}={self.path}"


def parse_grammars(options: Sequence[str]) -> tuple[GrammarFile, ...]:
    """The files of `NAME=FILE` and `NAME=KIND:FILE` options.

    Raises:
        RequestError: an option is not of that form, or its kind is not known; a name is given
            twice; there are too many.
    """
    if len(options) > MAX_GRAMMARS:
        raise RequestError(
            f"is given {len(options)} times", field=_OPTION, remedy=f"Give at most {MAX_GRAMMARS}"
        )
    files = [_parsed(option) for option in options]
    names = [one.name for one in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(
            f"gives the name {twice!r} twice", field=_OPTION, remedy="Give each its own"
        )
    return tuple(files)


def read_grammar_files(files: Sequence[GrammarFile]) -> dict[str, StoredGrammar]:
    """Their texts.

    Raises:
        RequestError: a file cannot be read, is too large, or is not UTF-8.
    """
    stored = {}
    for one in files:
        try:
            text = read_file(one.path, MAX_GRAMMAR_BYTES).decode()
        except (UnreadableError, UnicodeDecodeError) as error:
            raise RequestError(str(error), field=one.field) from error
        # An editor ends a file with a line feed, which no expression means.
        text = text.rstrip("\n") if one.kind == "regex" else text
        stored[one.name] = StoredGrammar(kind=one.kind, text=text, source=one.path.name)
    return stored


def write_grammars(engine: Path, grammars: Mapping[str, StoredGrammar]) -> None:
    """Into an engine that has its tokenizer."""
    if grammars:
        tokenizer = file_facts(engine / TOKENIZER_JSON).sha256
        record = StoredGrammars(tokenizer_sha256=tokenizer, grammars=dict(grammars))
        (engine / GRAMMARS_FILE).write_bytes(record_json(record))


def _parsed(option: str) -> GrammarFile:
    name, equals, rest = option.partition("=")
    if not equals or not rest or not re.match(NAME_PATTERN, name):
        raise RequestError(
            f"is {option!r}",
            field=_OPTION,
            remedy="Give NAME=FILE, with letters, digits, '_', '.' and '-' in the name",
        )
    kind, colon, path = rest.partition(":")
    found = next((one for one in _KINDS if colon and one == kind), None)
    if found is not None:
        return GrammarFile(name, found, Path(path))
    of_suffix = _OF_SUFFIX.get(Path(rest).suffix)
    if of_suffix is None:
        raise RequestError(
            f"{rest} has none of the suffixes {', '.join(_OF_SUFFIX)}",
            field=f"{_OPTION} {name}",
            remedy=f"Say what it is: {name}=KIND:{rest}, with one of {', '.join(_KINDS)}",
        )
    return GrammarFile(name, of_suffix, Path(rest))
