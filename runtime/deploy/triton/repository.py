"""Fills the directories of a Triton model repository; whoever calls it makes them appear whole.

<repository>/<model>/config.pbtxt
<repository>/<model>/<version>/model.py
<repository>/<model>/<version>/<engine>/     the engine's own files, tokenizer included
"""

import os
import shutil
from pathlib import Path

from trtc.protos.manifest import MANIFEST_FILE, read_manifest
from trtc.runtime.deploy.triton.engines import EngineSet, PackagedEngine

MODEL_FILE = "model.py"

_MODEL = '''\
"""Triton's Python backend loads this file; the model is trtc's, which must be installed there."""

from trtc.runtime.deploy.triton.python_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def fill_version(directory: Path, engines: EngineSet) -> None:
    """Write model.py and the engines into an empty version directory.

    Files are hard links of the engine's, so that weights are on the disk once: whatever trtc writes
    anew gets a new file. Where the file system allows no link they are copies.
    """
    (directory / MODEL_FILE).write_text(_MODEL)
    for engine in engines.engines:
        for name in (*engine.manifest.files, MANIFEST_FILE):
            target = directory / engine.directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _place(engine.path / name, target)


def packaged_engines(model: Path) -> EngineSet | None:
    """The engines of some version of a model that trtc packaged; None: there is none.

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


def _place(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
