"""What someone with bad intentions and the source code does to an engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from trtc.protos.manifest import MANIFEST_FILE, Manifest
from trtc.quant.hashing import file_facts


def write_sealed(engine: Path, document: dict[str, Any]) -> None:
    """Write a manifest whose digest is right, if it is one at all."""
    try:
        text = msgspec.convert(document, Manifest).sealed().to_json()
    except msgspec.ValidationError:
        text = json.dumps(document).encode()
    (engine / MANIFEST_FILE).write_bytes(text)


def reseal(engine: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Alter the manifest and mend its digest."""
    document = json.loads((engine / MANIFEST_FILE).read_bytes())
    change(document)
    write_sealed(engine, document)


def replace_file(engine: Path, name: str, content: bytes) -> None:
    """Replace a listed file and mend all digests."""
    (engine / name).write_bytes(content)
    facts = file_facts(engine / name)

    def mend(document: dict[str, Any]) -> None:
        document["files"][name]["sha256"] = facts.sha256
        document["files"][name]["bytes"] = facts.bytes
        document["files"][name]["chunks"] = list(facts.chunks)

    reseal(engine, mend)
