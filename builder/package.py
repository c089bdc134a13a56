"""An engine directory appears whole or not at all (protos/staging.py), its manifest last."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec

from trtc.protos import outputs
from trtc.protos.manifest import MANIFEST_FILE, SIGNATURE_FILE, FileFacts, Manifest
from trtc.protos.outputs import OutputKind, refuse_occupied
from trtc.protos.recognition import why_foreign
from trtc.protos.staging import Staging, absolute, staging
from trtc.quant.hashing import file_facts

_ENGINE = OutputKind(
    "an engine of trtc's", partial(why_foreign, record=MANIFEST_FILE, also=(SIGNATURE_FILE,))
)


def check_output(output: Path, *, force: bool) -> None:
    """Refuse an output that is in the way.

    Raises:
        OutputError: it exists and `force` is off, or it is not an engine and so not ours to
            replace.
    """
    refuse_occupied(output, _ENGINE, force=force)


@contextmanager
def workspace(output: Path, *, force: bool) -> Iterator[Staging]:
    """A directory to build in; it is removed on the way out unless it was published.

    Raises:
        OutputError: the output is in the way, another build of it is at work, or the disk refuses
            (full, read-only).
    """
    output = absolute(output)
    check_output(output, force=force)
    with staging(output) as work:
        yield work


def empty(work: Staging) -> None:
    """Delete a workspace's contents, to build in it again."""
    for directory in (work.new, work.scratch):
        shutil.rmtree(directory)
        directory.mkdir()


def seal(
    engine: Path, manifest: Manifest, known: Mapping[str, FileFacts] = MappingProxyType({})
) -> Manifest:
    """Hash the files that are there and write the manifest over them.

    Args:
        manifest: complete but for `files` and `digest`.
        known: files that have been hashed and not been written since.

    Returns:
        The manifest as written.
    """
    paths = sorted(path for path in engine.rglob("*") if path.is_file())
    names = {path.relative_to(engine).as_posix(): path for path in paths}
    names.pop(MANIFEST_FILE, None)
    files = {name: known.get(name) or file_facts(path) for name, path in names.items()}
    sealed = msgspec.structs.replace(manifest, files=files).sealed()
    (engine / MANIFEST_FILE).write_bytes(sealed.to_json())
    return sealed


def publish(
    work: Staging,
    manifest: Manifest,
    *,
    force: bool,
    known: Mapping[str, FileFacts] = MappingProxyType({}),
) -> Manifest:
    """Seal the engine and put it in its place; `known` as in `seal`.

    Raises:
        OutputError: something has come in the way meanwhile.
    """
    sealed = seal(work.new, manifest, known)
    for path in [*work.new.rglob("*"), work.new]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    outputs.publish(work, _ENGINE, force=force)
    return sealed
