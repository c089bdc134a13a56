"""Do an engine's files match its manifest? Asked before anything is mapped or loaded."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from trtc.protos.errors import EngineCorruptError
from trtc.protos.manifest import MANIFEST_FILE, FileFacts, Manifest

REBUILD = "Build the engine again, or copy it again from where it was built"


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
    names = list(manifest.files)
    # Hashing frees the GIL.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        digests = pool.map(_sha256, [engine / name for name in names])
        for name, digest in zip(names, digests, strict=True):
            if digest != manifest.files[name].sha256:
                raise EngineCorruptError(
                    "the content differs from the manifest's sha256",
                    field=str(engine / name),
                    remedy=REBUILD,
                )


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


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EngineCorruptError(
            f"cannot be read ({error.strerror})", field=str(path), remedy=REBUILD
        ) from error
