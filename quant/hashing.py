"""SHA-256 of files, as manifests list them."""

import hashlib
import io
from pathlib import Path
from typing import BinaryIO

from trtc.protos.manifest import CHUNK_BYTES, FileFacts


def file_facts(path: Path) -> FileFacts:
    """Hash a file; a large one chunk by chunk too, in the same reading."""
    with path.open("rb") as file:
        return _facts(file)


def bytes_facts(content: bytes) -> FileFacts:
    """The facts of a file with this content."""
    return _facts(io.BytesIO(content))


def _facts(file: BinaryIO) -> FileFacts:
    whole, chunks, size = hashlib.sha256(), [], 0
    while chunk := file.read(CHUNK_BYTES):
        whole.update(chunk)
        chunks.append(hashlib.sha256(chunk).hexdigest())
        size += len(chunk)
    return FileFacts(
        sha256=whole.hexdigest(),
        bytes=size,
        chunks=tuple(chunks) if len(chunks) > 1 else (),
    )
