"""Engines of one model in its version directory, and the choice of the one for this machine.

<version>/model.py
<version>/engine/              one engine: config.pbtxt's parameter `engine` names its directory
<version>/sm_90/, sm_120/ ...  one per GPU type: cc_model_filenames maps capabilities to them
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtc.protos.bundle import PLAN_BLOB_FILE
from trtc.protos.errors import EngineIncompatibleError, EnvironmentFault, RequestError
from trtc.protos.manifest import TOKENIZER_DIR, Manifest, read_manifest

ENGINE_DIR = "engine"


@dataclass(frozen=True)
class PackagedEngine:
    path: Path
    """The engine's directory, as built."""
    manifest: Manifest
    directory: str
    """Its name in the version directory."""


@dataclass(frozen=True)
class EngineSet:
    """The engines of one model: a single one, or one for each GPU type."""

    engines: tuple[PackagedEngine, ...]

    @property
    def on_gpu(self) -> bool:
        return self.engines[0].manifest.target.kind != "cpu"

    @property
    def by_capability(self) -> dict[str, str]:
        """Compute capability ("9.0") -> directory; empty for a single engine."""
        if len(self.engines) == 1:
            return {}
        return {
            _capability(arch): engine.directory
            for engine in self.engines
            for arch in engine.manifest.target.archs
        }


def read_engines(paths: Sequence[Path]) -> EngineSet:
    """Read the manifests of engines that become one model.

    Raises:
        EngineError: a manifest is missing, damaged or of another version.
        RequestError: an engine cannot be served, or several are not the same model for different
            GPUs.
    """
    manifests = [read_manifest(path) for path in paths]
    for path, manifest in zip(paths, manifests, strict=True):
        _check_whole(path, manifest)
    if len(paths) == 1:
        return EngineSet((PackagedEngine(paths[0], manifests[0], ENGINE_DIR),))
    seen: dict[str, Path] = {}
    for path, manifest in zip(paths, manifests, strict=True):
        _check_same_model(path, manifest, paths[0], manifests[0])
        for arch in manifest.target.archs:
            if arch in seen:
                raise RequestError(
                    f"is for {arch}, as {seen[arch]} is",
                    field=str(path),
                    remedy="Give one engine for each GPU type",
                )
            seen[arch] = path
    return EngineSet(
        tuple(
            PackagedEngine(path, manifest, "-".join(manifest.target.archs))
            for path, manifest in zip(paths, manifests, strict=True)
        )
    )


def choose_engine(
    version: Path, engine: str, by_capability: Mapping[str, str], sm: int | None
) -> Path:
    """The engine of a version directory for this machine.

    Args:
        engine: the parameter `engine`; "" if there are several engines.
        by_capability: cc_model_filenames.
        sm: SM of the model instance's GPU; None: there is no GPU.

    Raises:
        EnvironmentFault: there is no GPU, and the engines need one.
        EngineIncompatibleError: there is no engine for the GPU, or its name leads out of the
            directory.
    """
    name = _engine_for(sm, by_capability) if by_capability else engine
    if Path(name).name != name or name in ("", ".."):
        raise EngineIncompatibleError(
            f"names the engine {name!r}, which is no directory beside model.py",
            field="config.pbtxt",
            remedy="Package the model again",
        )
    return version / name


def _engine_for(sm: int | None, by_capability: Mapping[str, str]) -> str:
    if sm is None:
        raise EnvironmentFault(
            "is needed by every engine of the model",
            field="an NVIDIA GPU and its driver",
            remedy="Run the server where one is",
        )
    capability = _capability(f"sm_{sm}")
    if capability not in by_capability:
        raise EngineIncompatibleError(
            f"has engines for {', '.join(sorted(by_capability))}, the GPU is {capability}",
            field="config.pbtxt: cc_model_filenames",
            remedy=f"Package the model again with an engine built for sm_{sm}",
        )
    return by_capability[capability]


def _capability(arch: str) -> str:
    """`sm_90` -> `9.0`, Triton's notation."""
    sm = int(arch.removeprefix("sm_"))
    return f"{sm // 10}.{sm % 10}"


def _check_whole(path: Path, manifest: Manifest) -> None:
    if manifest.dummy_weights:
        raise RequestError(
            "was built without weights",
            field=str(path),
            remedy="Build it without --dummy-weights",
        )
    if manifest.target.kind == "tensorrt" and PLAN_BLOB_FILE not in manifest.files:
        raise RequestError(
            "is a bundle without a plan",
            field=str(path),
            remedy="Run `trtc compile` on it where its GPU is",
        )


def _check_same_model(path: Path, manifest: Manifest, first_path: Path, first: Manifest) -> None:
    if manifest.target.kind == "cpu":
        raise RequestError(
            "is for CPUs, of which a model has one engine",
            field=str(path),
            remedy="One CPU engine holds code for several processors: --target cpu:ISA,ISA",
        )
    for field, ours, theirs in (
        ("target.kind", manifest.target.kind, first.target.kind),
        ("model", manifest.model, first.model),
        ("limits", manifest.limits, first.limits),
        ("tokenizer", _tokenizer(manifest), _tokenizer(first)),
    ):
        if ours != theirs:
            raise RequestError(
                f"differs from {first_path} in its {field}",
                field=str(path),
                remedy="Give engines built from one checkpoint with the same limits",
            )


def _tokenizer(manifest: Manifest) -> dict[str, str]:
    return {
        name: facts.sha256
        for name, facts in manifest.files.items()
        if name.startswith(f"{TOKENIZER_DIR}/")
    }
