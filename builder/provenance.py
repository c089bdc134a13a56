"""Provenance of an engine: digests of the checkpoint, versions, and the options given.

No times and no paths of the machine: the same inputs give the same record.
"""

import hashlib
import platform
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from importlib import metadata
from pathlib import Path

from trtc.builder.request import BuildRequest
from trtc.protos.errors import CheckpointError
from trtc.protos.files import UnreadableError, open_regular
from trtc.protos.manifest import Provenance
from trtc.quant.calibration_mixture import parse_calibration
from trtc.version import __version__

_PACKAGES = (
    "ml_dtypes",
    "numpy",
    "nvidia-modelopt",
    "onnx",
    "onnx-graphsurgeon",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)
_KERNEL_PACKAGES = ("triton", "nvidia-cuda-nvrtc")
_PACKAGES_OF_TARGET = {
    "cpu": (),
    "cuda": _KERNEL_PACKAGES,
    "tensorrt": (*_KERNEL_PACKAGES, "tensorrt-cu13"),
    "tensorrt_rtx": (*_KERNEL_PACKAGES, "tensorrt-rtx-cu13"),
}
"""target.kind -> what its code is compiled by, beside the packages of every build."""
_WITHOUT_EFFECT = frozenset({"model", "output", "force", "revision"})
"""Fields of a request that say where things are; the model and its revision are recorded."""
_MAX_THREADS = 16


def provenance_of(request: BuildRequest, checkpoint: Path, kind: str) -> Provenance:
    """The record of a build.

    Args:
        checkpoint: directory that the model was read from.
        kind: of the target.

    Raises:
        CheckpointError: a file of the checkpoint cannot be read.
    """
    files = _checkpoint_files(checkpoint, weights=not request.dummy_weights)
    with ThreadPoolExecutor(_MAX_THREADS, "trtc-provenance") as pool:
        digests = pool.map(_sha256, files)
        checkpoint_files = {
            str(path.relative_to(checkpoint)): digest
            for path, digest in zip(files, digests, strict=True)
        }
    return Provenance(
        checkpoint=checkpoint_files,
        packages=_versions((*_PACKAGES, *_PACKAGES_OF_TARGET[kind])),
        options=_options(request),
    )


def _checkpoint_files(checkpoint: Path, *, weights: bool) -> list[Path]:
    kinds = (".json", ".jinja", ".model", *((".safetensors",) if weights else ()))
    listed = [*checkpoint.iterdir(), *checkpoint.glob("additional_chat_templates/*")]
    return sorted(path for path in listed if path.suffix in kinds and path.is_file())


def _sha256(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (UnreadableError, OSError) as error:
        raise CheckpointError(str(error), field=str(path)) from error


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {"python": platform.python_version(), "trtc": __version__}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an optional one: the target says elsewhere what it was compiled with
    return found


def _options(request: BuildRequest) -> dict[str, str]:
    """Options that differ from their defaults; of a path its name."""
    given = {}
    for field in fields(request):
        value = getattr(request, field.name)
        if field.name not in _WITHOUT_EFFECT and value != field.default:
            given[field.name] = value.name if isinstance(value, Path) else _text(field.name, value)
    if request.family is not None:
        given["family"] = f"{request.family.name}, sha256 {_sha256(request.family)}"
    return given


def _text(name: str, value: object) -> str:
    """A reference is a model: a directory's name, or the hub's. Calibration files go by name."""
    if name == "calib" and isinstance(value, str):
        files = parse_calibration(value)
        return ",".join(
            one.path.name if len(files) == 1 else f"{one.path.name}:{one.share:.3g}"
            for one in files
        )
    if name == "reference" and isinstance(value, str) and Path(value).is_dir():
        return Path(value).resolve().name
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
