"""Do an engine's files match its manifest? Asked before anything is mapped or loaded."""

import hashlib
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trtc.protos.errors import EngineCorruptError
from trtc.protos.manifest import CHUNK_BYTES, MANIFEST_FILE, FileFacts, Manifest
from trtc.runtime.background import make_way
from trtc.runtime.machine import num_usable_cores

REBUILD = "Build the engine again, or copy it again from where it was built"
_MAX_THREADS = 16
_BLOCK_BYTES = 1 << 23


def verify_files(engine: Path, manifest: Manifest) -> None:
    """Compare every file's size, then every file's SHA-256, with the manifest.

    Raises:
        EngineCorruptError: names the file.
    """
    check_sizes(engine, manifest)
    check = HashCheck(engine, manifest, manifest.files)
    try:
        check.wait()
    finally:
        check.close()


def check_sizes(engine: Path, manifest: Manifest) -> None:
    """Compare every file's size with the manifest, which costs nothing.

    Raises:
        EngineCorruptError: names the file.
    """
    for name, facts in manifest.files.items():
        _check_size(engine, name, facts)


class HashCheck:
    """Compares the hashes of some files in threads of its own, which make way for others.

    Nothing is hashed before somebody calls `begin` or `wait`. Hashing frees the GIL.
    """

    def __init__(self, engine: Path, manifest: Manifest, names: Collection[str]) -> None:
        """
        Raises:
            EngineCorruptError: the manifest's chunks do not cover a file.
        """
        self._engine = engine
        self._pieces = [piece for name in names for piece in _pieces(name, manifest.files[name])]
        self._pool = ThreadPoolExecutor(_num_threads(), "trtc-verify", initializer=make_way)
        self._checks: list[Future[None]] = []
        self._beginning = threading.Lock()

    def begin(self) -> None:
        """Start hashing. Idempotent."""
        with self._beginning:
            if not self._checks:
                self._checks = [
                    self._pool.submit(_compare, self._engine, piece) for piece in self._pieces
                ]

    def wait(self) -> None:
        """Begin, and return when all files are as the manifest says.

        Raises:
            EngineCorruptError: one is not; the message names it.
        """
        self.begin()
        for check in self._checks:
            check.result()

    def raise_failure(self) -> None:
        """Raise what has been found by now, if anything."""
        for check in self._checks:
            if check.done():
                check.result()

    def close(self) -> None:
        """Stop hashing. Idempotent."""
        self._pool.shutdown(cancel_futures=True)


def _num_threads() -> int:
    return min(_MAX_THREADS, num_usable_cores())


@dataclass(frozen=True)
class _Piece:
    """Consecutive bytes of a file, and what they hash to."""

    name: str
    begin: int
    bytes: int
    sha256: str


def _compare(engine: Path, piece: _Piece) -> None:
    """Hash a piece.

    Raises:
        EngineCorruptError: it is not what the manifest says.
    """
    if _sha256(engine / piece.name, piece) != piece.sha256:
        raise EngineCorruptError(
            "the content differs from the manifest's sha256",
            field=str(engine / piece.name),
            remedy=REBUILD,
        )


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
    # Large blocks: a thread that makes way for others should not often hold the GIL while it does.
    block = memoryview(bytearray(min(_BLOCK_BYTES, left)))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(piece.begin)
            while left and (count := file.readinto(block[: min(_BLOCK_BYTES, left)])):
                digest.update(block[:count])
                left -= count
    except OSError as error:
        raise EngineCorruptError(
            f"cannot be read ({error.strerror})", field=str(path), remedy=REBUILD
        ) from error
    return digest.hexdigest()
