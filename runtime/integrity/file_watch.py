"""Detects writes to files that a running engine has mapped.

A mapping reflects writes to its file, so weights that are overwritten in place would silently
change tokens. Replacing a file by another of the same name is harmless: the engine keeps the old
one open.
"""

import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

from trtc.protos.errors import EngineCorruptError
from trtc.protos.files import UnreadableError, open_regular
from trtc.protos.manifest import FileFacts, Manifest
from trtc.runtime.integrity.engine_files import REBUILD, FileIdentity, changed_while_opening
from trtc.runtime.integrity.verify import chunks_of, hash_chunk


class FileWatch:
    """Files of an open engine. Thread-safe; close it when the engine is closed."""

    def __init__(self, engine: Path, manifest: Manifest, found: Mapping[str, FileIdentity]) -> None:
        """
        Raises:
            EngineCorruptError: a file differs from `found`.
        """
        self._files: list[_WatchedFile] = []
        self._failure: EngineCorruptError | None = None
        self._looking = threading.Lock()
        try:
            for name, identity in found.items():
                facts = manifest.files[name]
                self._files.append(_WatchedFile(engine / name, facts, identity))
        except EngineCorruptError:
            self.close()
            raise

    def raise_if_changed(self) -> None:
        """Check the files' status, which takes microseconds.

        If only the time of the last status change differs (a new mode, owner or name), the hashes
        are compared again.

        Raises:
            EngineCorruptError: a file has been written to; from then on raised at every call.
        """
        with self._looking:
            if self._failure is None:
                self._failure = next(filter(None, (file.change() for file in self._files)), None)
            if self._failure is not None:
                failure = self._failure
                raise EngineCorruptError(
                    failure.problem, field=failure.field, remedy=failure.remedy
                )

    def close(self) -> None:
        """Idempotent."""
        with self._looking:
            for file in self._files:
                file.close()
            self._files = []


class _WatchedFile:
    def __init__(self, path: Path, facts: FileFacts, identity: FileIdentity) -> None:
        self._path = path
        self._facts = facts
        self._identity = identity
        try:
            with open_regular(path) as file:
                self._descriptor = os.dup(file.fileno())
        except UnreadableError as error:
            raise EngineCorruptError(str(error), field=str(path), remedy=REBUILD) from error
        self.close = weakref.finalize(self, os.close, self._descriptor)
        """Also called when the object is garbage-collected. Idempotent."""
        if self._now() != identity:
            self.close()
            raise changed_while_opening(path)

    def change(self) -> EngineCorruptError | None:
        """The error of a change to the file; None: its content is unchanged."""
        try:
            now = self._now()
            if now == self._identity:
                return None
            if now.content_mark == self._identity.content_mark and self._is_whole():
                self._identity = now
                return None
            return self._damage("was written to while it was in use")
        except OSError as error:
            return self._damage(f"cannot be read any more ({error.strerror})")

    def _now(self) -> FileIdentity:
        return FileIdentity.of(os.fstat(self._descriptor))

    def _is_whole(self) -> bool:
        chunks = chunks_of(self._path.name, self._facts)
        return all(hash_chunk(self._descriptor, chunk) == chunk.sha256 for chunk in chunks)

    def _damage(self, problem: str) -> EngineCorruptError:
        return EngineCorruptError(
            problem,
            field=str(self._path),
            remedy="Copy the engine again from where it was built, and restart",
        )
