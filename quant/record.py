"""The record of a quantised checkpoint: its origin, and the hash of every file."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trtc.protos.outputs import OutputKind
from trtc.protos.recognition import record_digest, why_foreign
from trtc.quant.hashing import file_facts

RECORD_FILE = "trtc_quantization.json"
_SCHEMA_VERSION = 1
CHECKPOINT = OutputKind(
    "a quantised checkpoint of trtc's", partial(why_foreign, record=RECORD_FILE)
)
"""What `trtc quantize` writes, and replaces with --force."""


def write_record(directory: Path, trtc_version: str, facts: dict[str, Any]) -> None:
    """Hash the directory's files and write the record, by which `--force` knows its own output.

    Args:
        facts: what the record says besides; values that JSON has.
    """
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    files = {path.relative_to(directory).as_posix(): file_facts(path) for path in paths}
    record = {
        **facts,
        "schema_version": _SCHEMA_VERSION,
        "trtc_version": trtc_version,
        "files": msgspec.to_builtins(files),
    }
    record["digest"] = record_digest(record)
    text = msgspec.json.format(msgspec.json.encode(record, order="sorted"), indent=1)
    (directory / RECORD_FILE).write_bytes(text + b"\n")
