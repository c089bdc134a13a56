"""Fills the directories of a Triton model repository; the caller renames them into place.

<repository>/<model>/config.pbtxt
<repository>/<model>/<version>/model.py
<repository>/<model>/<version>/<engine>/     the engine's own files, tokenizer included
"""

import os
import shutil
from pathlib import Path

from trtc.protos.manifest import MANIFEST_FILE, SIGNATURE_FILE, read_manifest
from trtc.protos.recognition import why_foreign
from trtc.runtime.frontends.triton.engines import EngineSet, PackagedEngine

MODEL_FILE = "model.py"

_MODEL = '''\
"""Triton's Python backend loads this file; the model is trtc's, which must be installed there."""

from trtc.runtime.frontends.triton.python_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def fill_version(directory: Path, engines: EngineSet) -> None:
    """Write model.py and the engines into an empty version directory.

    Files are hard links to the engine's, so that weights are on the disk once; trtc never writes
    into existing files. If the file system has no hard links they are copies.
    """
    (directory / MODEL_FILE).write_text(_MODEL)
    for engine in engines.engines:
        signature = (SIGNATURE_FILE,) if (engine.path / SIGNATURE_FILE).is_file() else ()
        for name in (*engine.manifest.files, MANIFEST_FILE, *signature):
            target = directory / engine.directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _place(engine.path / name, target)


def packaged_engines(model: Path) -> EngineSet | None:
    """The engines of any version of a model that trtc packaged; None: there is none.

    Raises:
        EngineError: a manifest is damaged or of another version of trtc.
    """
    manifests = sorted(model.glob(f"*/*/{MANIFEST_FILE}"))
    if not manifests:
        return None
    version = manifests[-1].parent.parent
    engines = [path.parent for path in manifests if path.parent.parent == version]
    return EngineSet(
        tuple(PackagedEngine(path, read_manifest(path), path.name) for path in engines)
    )


def why_foreign_version(version: Path) -> str | None:
    """Why a directory is not a version that `fill_version` wrote, as a clause; None: it is."""
    model = version / MODEL_FILE
    if not model.is_file() or model.read_text(errors="replace") != _MODEL:
        return f"it has no {MODEL_FILE} that trtc wrote"
    for entry in sorted(version.iterdir()):
        # The server's Python writes a cache next to model.py.
        if entry.name not in (MODEL_FILE, "__pycache__"):
            problem = why_foreign(entry, MANIFEST_FILE, (SIGNATURE_FILE,))
            if problem is not None:
                return f"{entry.name} in it is no engine: {problem}"
    return None


def _place(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
