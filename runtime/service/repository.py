"""Repositories: engines that can be loaded by name.

    DIR/NAME/manifest.json              one engine
    DIR/NAME/VERSION/manifest.json      versions, of which the highest is served

A manifest is written last, so a directory without one is incomplete and is skipped. Names come from
clients: names with other characters are not looked up, and links that lead out of DIR are refused.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtc.protos.errors import EngineCorruptError, RequestError, UnknownModelError
from trtc.protos.manifest import MANIFEST_FILE
from trtc.runtime.engine.config import EngineSource

MAX_MODELS = 1000
"""Most models of a repository; more are an error instead of a long wait."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_NO_NAME = (
    "Names are letters, digits, '.', '_' and '-', at most 128, and begin with one of the first"
)


@dataclass(frozen=True)
class Found:
    """An engine that can be loaded."""

    source: EngineSource
    mark: tuple[int, ...]
    """Identity of its manifest file; if it differs, the engine has changed."""


class Repository(Protocol):
    """Engines by name. Its methods read the disk: call them in a thread."""

    def names(self) -> Sequence[str]:
        """Names of the engines that can be loaded, in order.

        Raises:
            RequestError: they cannot be listed.
        """
        ...

    def find(self, name: str) -> Found:
        """The engine that a name stands for now.

        Raises:
            UnknownModelError: there is no such engine.
            EngineCorruptError: the engine may not be opened.
        """
        ...


class FixedRepository:
    """Engines given on the command line (implements Repository)."""

    def __init__(self, sources: Sequence[EngineSource]) -> None:
        self._sources = {one.name: one for one in sources}

    def names(self) -> Sequence[str]:
        return tuple(self._sources)

    def find(self, name: str) -> Found:
        if name not in self._sources:
            raise _unknown(name, self._sources)
        source = self._sources[name]
        return Found(source, _mark(source.path))


class DirectoryRepository:
    """Engines below a directory (implements Repository)."""

    def __init__(self, root: Path) -> None:
        """
        Raises:
            RequestError: `root` is not a directory.
        """
        self._root = root
        if not root.is_dir():
            raise RequestError(f"{root} is not a directory", field="--models")

    def names(self) -> Sequence[str]:
        try:
            found = sorted(one for one in _directories(self._root) if _NAME.fullmatch(one))
        except OSError as error:
            raise RequestError(f"cannot be read ({error.strerror})", field="--models") from error
        if len(found) > MAX_MODELS:
            raise RequestError(
                f"has {len(found)} directories",
                field=f"--models {self._root}",
                remedy=f"A repository has at most {MAX_MODELS} models",
            )
        return [name for name in found if self._newest(self._root / name) is not None]

    def find(self, name: str) -> Found:
        if not _NAME.fullmatch(name):
            raise UnknownModelError(f"is {name[:100]!r}", field="model_name", remedy=_NO_NAME)
        newest = self._newest(self._root / name)
        if newest is None:
            raise _unknown(name, self.names())
        path, version = newest
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise EngineCorruptError(
                "leads out of the directory of models",
                field=f"{name}, version {version}",
                remedy="Copy the engine into it",
            )
        return Found(EngineSource(name, path, version=version), _mark(path))

    def _newest(self, path: Path) -> tuple[Path, str] | None:
        """The directory and version of the newest complete engine; None: there is none."""
        if (path / MANIFEST_FILE).is_file():
            return path, "1"
        try:
            versions = [int(one) for one in _directories(path) if _VERSION.fullmatch(one)]
        except OSError:
            return None
        for version in sorted(versions, reverse=True):
            if (path / str(version) / MANIFEST_FILE).is_file():
                return path / str(version), str(version)
        return None


def _directories(path: Path) -> Iterator[str]:
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir():
                yield entry.name


def _mark(path: Path) -> tuple[int, ...]:
    try:
        status = (path / MANIFEST_FILE).stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _unknown(name: str, known: Sequence[str] | dict[str, EngineSource]) -> UnknownModelError:
    return UnknownModelError(
        f"no engine is called {name[:100]!r}",
        field="model_name",
        remedy=f"Choose one of: {', '.join(sorted(known)[:20])}" if known else "There is none",
    )
