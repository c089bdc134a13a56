"""The grammars of an engine, which requests can use by name."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from trtc.protos.errors import EngineCorruptError
from trtc.protos.manifest import TOKENIZER_DIR, Manifest
from trtc.protos.record import Record, read_record

GRAMMARS_FILE = "grammars.json"
TOKENIZER_JSON = f"{TOKENIZER_DIR}/tokenizer.json"
"""The tokenizer that the grammars are compiled for."""
MAX_GRAMMAR_BYTES = 1 << 18
"""Most bytes of one grammar's text."""
MAX_GRAMMARS = 64
"""Most grammars of an engine."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"

StoredKind = Literal["json_schema", "regex", "lark", "structural_tag"]


class StoredGrammar(Record, frozen=True):
    kind: StoredKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_BYTES)]
    source: str
    """Name of the file that it was read from."""


class StoredGrammars(Record, frozen=True):
    tokenizer_sha256: str
    """Of the engine's tokenizer.json."""
    grammars: Annotated[
        dict[Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)], StoredGrammar],
        msgspec.Meta(min_length=1, max_length=MAX_GRAMMARS),
    ]


def read_grammars(engine: Path, manifest: Manifest) -> dict[str, StoredGrammar]:
    """An engine's grammars by their names.

    Raises:
        EngineCorruptError: the file is damaged, or of another tokenizer than the engine's.
    """
    if GRAMMARS_FILE not in manifest.files:
        return {}
    stored = read_record(engine / GRAMMARS_FILE, StoredGrammars)
    facts = manifest.files.get(TOKENIZER_JSON)
    if facts is None or facts.sha256 != stored.tokenizer_sha256:
        raise EngineCorruptError(
            "is of another tokenizer than the engine's",
            field=f"{engine / GRAMMARS_FILE}: tokenizer_sha256",
            remedy="Build the engine again",
        )
    return stored.grammars
