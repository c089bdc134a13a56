"""Do an engine's files match its manifest? Asked before anything is mapped or loaded."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trtc.protos.errors import EngineCorruptError
from trtc.protos.manifest import CHUNK_BYTES, MANIFEST_FILE, FileFacts, Manifest
from trtc.runtime.machine import num_usable_cores

REBUILD = "Build the engine again, or copy it again from where it was built"
_MAX_THREADS = 16
_BLOCK_BYTES = 1 << 20


def verify_files(engine: Path, manifest: Manifest, *, hashes: bool = True) -> None:
    """Compare every file's size, then every file's SHA-256, with the manifest.

    Args:
        hashes: False stops after the sizes, which cost nothing.

    Raises:
        EngineCorruptError: names the file.
    """
    for name, facts in manifest.files.items():
        _check_size(engine, name, facts)
    if not hashes:
        return
    pieces = [piece for name, facts in manifest.files.items() for piece in _pieces(name, facts)]
    # Hashing frees the GIL.
    with ThreadPoolExecutor(min(_MAX_THREADS, num_usable_cores())) as pool:
        digests = pool.map(lambda piece: _sha256(engine / piece.name, piece), pieces)
        for piece, digest in zip(pieces, digests, strict=True):
            if digest != piece.sha256:
                raise EngineCorruptError(
                    "the content differs from the manifest's sha256",
                    field=str(engine / piece.name),
                    remedy=REBUILD,
                )


@dataclass(frozen=True)
class _Piece:
    """Consecutive bytes of a file, and what they hash to."""

    name: str
    begin: int
    bytes: int
    sha256: str


def _pieces(name: str, facts: FileFacts) -> Iterator[_Piece]:
    """A file, or its chunks: either way all of its bytes.

    Raises:
        EngineCorruptError: the chunks do not cover the file.
    """
    if not facts.chunks:
        yield _Piece(name, 0, facts.bytes, facts.sha256)
        return
    begins = range(0, facts.bytes, CHUNK_BYTES)
    if len(begins) != len(facts.chunks):
        raise EngineCorruptError(
            f"has {len(facts.chunks)} chunks for {facts.bytes} bytes",
            field=f"manifest.json: files.{name}",
            remedy=REBUILD,
        )
    for begin, sha256 in zip(begins, facts.chunks, strict=True):
        yield _Piece(name, begin, min(CHUNK_BYTES, facts.bytes - begin), sha256)


def _check_size(engine: Path, name: str, facts: FileFacts) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise EngineCorruptError(f"{name!r} leads out of the engine", field=MANIFEST_FILE)
    try:
        found = (engine / name).stat().st_size
    except OSError as error:
        raise EngineCorruptError(
            f"cannot be read ({error.strerror})", field=str(engine / name), remedy=REBUILD
        ) from error
    if found != facts.bytes:
        raise EngineCorruptError(
            f"has {found} bytes, the manifest says {facts.bytes}",
            field=str(engine / name),
            remedy=REBUILD,
        )


def _sha256(path: Path, piece: _Piece) -> str:
    digest, left = hashlib.sha256(), piece.bytes
    try:
        with path.open("rb") as file:
            file.seek(piece.begin)
            while left and (block := file.read(min(_BLOCK_BYTES, left))):
                digest.update(block)
                left -= len(block)
    except OSError as error:
        raise EngineCorruptError(
            f"cannot be read ({error.strerror})", field=str(path), remedy=REBUILD
        ) from error
    return digest.hexdigest()
