"""Compares an engine's files with its manifest, before anything is mapped or loaded."""

import hashlib
import io
import os
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from trtc.protos.errors import EngineCorruptError, UnavailableError
from trtc.protos.files import UnreadableError, open_regular
from trtc.protos.manifest import CHUNK_BYTES, FileFacts, Manifest
from trtc.runtime.host.background import lower_priority
from trtc.runtime.host.machine import num_usable_cores
from trtc.runtime.integrity.engine_files import (
    REBUILD,
    FileIdentity,
    changed_while_opening,
    find_files,
    refuse_unlisted,
)

_MAX_THREADS = 16
_BLOCK_BYTES = 1 << 23


def verify_files(engine: Path, manifest: Manifest) -> None:
    """Compare every file's size, then every file's SHA-256, with the manifest.

    Raises:
        EngineCorruptError: a file differs, or is not listed; the message names it.
    """
    refuse_unlisted(engine, manifest)
    find_files(engine, manifest, manifest.files)
    check = HashCheck(engine, manifest, manifest.files)
    try:
        check.wait()
    finally:
        check.close()


class FileChunk(NamedTuple):
    """Consecutive bytes of a file, and their expected hash."""

    name: str
    begin: int
    bytes: int
    sha256: str
    identity: FileIdentity | None = None
    """Identity that the file must have; None: any."""


class HashCheck:
    """Compares the hashes of files in its own threads, of low priority.

    Hashing starts with `begin` or `wait`, and releases the GIL.
    """

    def __init__(
        self,
        engine: Path,
        manifest: Manifest,
        names: Collection[str],
        found: Mapping[str, FileIdentity] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            found: identities of files, which must not have been replaced or written to since.

        Raises:
            EngineCorruptError: the manifest's chunks do not cover a file.
        """
        self._engine = engine
        self._pieces = deque(
            chunk._replace(identity=found.get(name))
            for name in names
            for chunk in chunks_of(name, manifest.files[name])
        )
        """Those that no thread has taken."""
        self._num_left = len(self._pieces)
        """Chunks that are not known to be whole."""
        self._failure: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Start hashing. Idempotent."""
        with self._changed:
            if self._threads:
                return
            number = min(_MAX_THREADS, num_usable_cores(), len(self._pieces))
            self._threads = [
                threading.Thread(target=self._run, name=f"trtc-verify-{at}", daemon=True)
                for at in range(number)
            ]
            for thread in self._threads:
                thread.start()

    def wait(self) -> None:
        """Start if need be, and wait until all files have been compared.

        Raises:
            EngineCorruptError: a file differs from the manifest; the message names it.
            UnavailableError: the check was closed before.
        """
        self.begin()
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_left == 0 or self._failure is not None or self._is_closed
            )
        self.raise_failure()
        if self._num_left:
            raise UnavailableError("the engine was closed before its files were verified")

    def raise_failure(self) -> None:
        """Raise the error found so far, if any."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop hashing. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._pieces.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            lower_priority()
            while (chunk := self._take()) is not None:
                _compare(self._engine, chunk)
                with self._changed:
                    self._num_left -= 1
                    self._changed.notify_all()
        except BaseException as failure:  # noqa: BLE001 (a thread's last frame: `wait` raises it)
            with self._changed:
                self._failure = self._failure or failure
                self._pieces.clear()
                self._changed.notify_all()

    def _take(self) -> FileChunk | None:
        with self._changed:
            return self._pieces.popleft() if self._pieces else None


def _compare(engine: Path, chunk: FileChunk) -> None:
    """Hash a chunk.

    Raises:
        EngineCorruptError: the hash differs from the manifest's.
    """
    if _sha256(engine / chunk.name, chunk) != chunk.sha256:
        raise EngineCorruptError(
            "the content differs from the manifest's sha256",
            field=str(engine / chunk.name),
            remedy=REBUILD,
        )


def chunks_of(name: str, facts: FileFacts) -> Iterator[FileChunk]:
    """The chunks of a file; without chunks in its manifest, all of it as one.

    Raises:
        EngineCorruptError: the chunks do not cover the file.
    """
    if not facts.chunks:
        yield FileChunk(name, 0, facts.bytes, facts.sha256)
        return
    begins = range(0, facts.bytes, CHUNK_BYTES)
    if len(begins) != len(facts.chunks):
        raise EngineCorruptError(
            f"has {len(facts.chunks)} chunks for {facts.bytes} bytes",
            field=f"manifest.json: files.{name}",
            remedy=REBUILD,
        )
    for begin, sha256 in zip(begins, facts.chunks, strict=True):
        yield FileChunk(name, begin, min(CHUNK_BYTES, facts.bytes - begin), sha256)


def _sha256(path: Path, chunk: FileChunk) -> str:
    try:
        with open_regular(path) as file:
            _check_same(path, file, chunk.identity)
            digest = hash_chunk(file.fileno(), chunk)
            _check_same(path, file, chunk.identity)
            return digest
    except UnreadableError as error:
        raise EngineCorruptError(str(error), field=str(path), remedy=REBUILD) from error
    except OSError as error:
        raise EngineCorruptError(
            f"cannot be read ({error.strerror})", field=str(path), remedy=REBUILD
        ) from error


def _check_same(path: Path, file: io.FileIO, identity: FileIdentity | None) -> None:
    if identity is not None and FileIdentity.of(os.fstat(file.fileno())) != identity:
        raise changed_while_opening(path)


def hash_chunk(descriptor: int, chunk: FileChunk) -> str:
    """SHA-256 of a chunk, or of as much of it as there is."""
    digest, at, end = hashlib.sha256(), chunk.begin, chunk.begin + chunk.bytes
    # Large blocks: a thread of low priority should not often hold the GIL while it does.
    block = memoryview(bytearray(min(_BLOCK_BYTES, chunk.bytes)))
    while at < end and (count := os.preadv(descriptor, [block[: end - at]], at)):
        digest.update(block[:count])
        at += count
    return digest.hexdigest()
