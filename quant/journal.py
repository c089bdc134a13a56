"""Quantised layers on disk: a calibration that was killed goes on from them, a search reads them.

    <directory>/<key of the inputs>/<key of the run>/layer-00000.safetensors ...   what they became
                                                     streams-00000.safetensors     of the last layer
                                                     scores.json                   of a search

Hidden states are written as they are in memory: a run that goes on makes what it would have made,
bit for bit.
Files are renamed into place when they are on the disk, the streams of a layer after the layer.
"""

import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trtc.protos.manifest import LayerError
from trtc.protos.staging import sync
from trtc.quant.calibration_text import Int32s
from trtc.quant.tensor_shards import apart
from trtc.version import __version__

_LAYER, _STREAMS = "layer", "streams"
_ERRORS = "errors"
_SCORES = "scores.json"
_READ = (".safetensors", ".json")
"""Files of a checkpoint that decide what calibration makes."""
_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class SavedLayer:
    """What a journal has of a layer."""

    tensors: Mapping[str, torch.Tensor]
    """On the CPU."""
    errors: tuple[LayerError, ...]
    about: Mapping[str, str] = field(default_factory=dict)
    """What else there is to know of the tensors."""


def key_of_inputs(
    model_dir: Path, sequences: Iterable[Sequence[Int32s]], device: str, dtype: str
) -> str:
    """A digest of all that decides the bits of a calibration beside its settings: the checkpoint's
    files, tokens, versions, and what computes."""
    digest = hashlib.sha256()
    files = sorted(path for path in model_dir.iterdir() if path.suffix in _READ and path.is_file())
    with ThreadPoolExecutor(torch.get_num_threads(), "trtc-digest") as pool:
        for path, own in zip(files, pool.map(_digest_of, files), strict=True):
            digest.update(f"{path.name} {own}\n".encode())
    for windows in sequences:
        digest.update(f"{[len(ids) for ids in windows]}\n".encode())
        for ids in windows:
            digest.update(ids.tobytes())
    versions = {name: metadata.version(name) for name in _PACKAGES}
    computed = (__version__, versions, device, dtype, platform.machine(), torch.get_num_threads())
    digest.update(repr((*computed, torch.backends.cpu.get_cpu_capability())).encode())
    return digest.hexdigest()


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Journal:
    """The layers of one run."""

    directory: Path
    resumes: bool = True
    """Whether it has hidden states as well, without which a run begins again."""

    def num_layers(self) -> int:
        """How many layers are there, with the streams after the last of them.

        What cannot be read counts as absent.
        """
        for path in sorted(self.directory.glob(f"{_STREAMS}-*.safetensors"), reverse=True):
            with suppress(OSError, SafetensorError, ValueError):
                last = int(path.stem.removeprefix(f"{_STREAMS}-"))
                for index in range(last + 1):
                    _check(self._file(_LAYER, index))
                _check(path)
                return last + 1
        return 0

    def layer(self, index: int, is_wanted: Callable[[str], bool] | None = None) -> SavedLayer:
        """One of them.

        Args:
            is_wanted: whether to read a tensor, by its name; None: all.
        """
        with safe_open(self._file(_LAYER, index), framework="pt") as file:
            about = dict(file.metadata())
            tensors = {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 (it is no mapping)
                if is_wanted is None or is_wanted(name)
            }
        errors = msgspec.convert(json.loads(about.pop(_ERRORS)), tuple[LayerError, ...])
        return SavedLayer(tensors, errors, about)

    def streams(self, index: int) -> Iterator[torch.Tensor]:
        """The hidden states of all batches of all streams after a layer."""
        with safe_open(self._file(_STREAMS, index), framework="pt") as file:
            for number in range(len(file.keys())):
                yield file.get_tensor(f"{number:06}")

    def save(self, index: int, layer: SavedLayer, hidden: Iterable[torch.Tensor]) -> None:
        """Write a layer, and the hidden states after it in place of those before."""
        errors = json.dumps(msgspec.to_builtins(layer.errors))
        self._write(_LAYER, index, layer.tensors, {**layer.about, _ERRORS: errors})
        if self.resumes:
            self.save_streams(index, hidden)
            self._file(_STREAMS, index - 1).unlink(missing_ok=True)

    def save_streams(self, index: int, hidden: Iterable[torch.Tensor]) -> None:
        """Write the hidden states after a layer."""
        after = {f"{number:06}": one.cpu() for number, one in enumerate(hidden)}
        self._write(_STREAMS, index, after, {})

    def drop_streams(self) -> None:
        """Remove all hidden states."""
        for path in self.directory.glob(f"{_STREAMS}-*"):
            path.unlink()

    def scores(self) -> dict[tuple[str, str], float] | None:
        """What was saved of a search; None: nothing that can be read."""
        with suppress(OSError, msgspec.MsgspecError):
            saved = (self.directory / _SCORES).read_bytes()
            rows = msgspec.json.decode(saved, type=list[tuple[str, str, float]])
            return {(site, name): score for site, name, score in rows}
        return None

    def save_scores(self, scores: Mapping[tuple[str, str], float]) -> None:
        """Keep a search's scores, by site and format."""
        self.directory.mkdir(parents=True, exist_ok=True)
        rows = [(*key, score) for key, score in scores.items()]
        partial = (self.directory / _SCORES).with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(rows))
        self._publish(partial, _SCORES)

    def _file(self, kind: str, index: int) -> Path:
        return self.directory / f"{kind}-{index:05}.safetensors"

    def _write(
        self, kind: str, index: int, tensors: Mapping[str, torch.Tensor], about: dict[str, str]
    ) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self._file(kind, index)
        partial = path.with_suffix(".partial")
        save_file(apart(tensors), partial, about)
        self._publish(partial, path.name)

    def _publish(self, partial: Path, name: str) -> None:
        sync(partial)
        partial.replace(self.directory / name)
        sync(self.directory)


def _check(path: Path) -> None:
    with safe_open(path, framework="pt"):
        pass


@dataclass(frozen=True)
class Journals:
    """The runs of one build, which have the same inputs."""

    directory: Path
    resumes: bool = True
    """As of each journal."""

    def of_run(self, settings: object) -> Journal:
        """The journal of a run.

        Args:
            settings: all that decides what it makes of the inputs; its `repr` says all of it.
        """
        key = hashlib.sha256(repr(settings).encode()).hexdigest()
        return Journal(self.directory / key[:32], self.resumes)


def open_journals(directory: Path | None, key: str) -> Journals | None:
    """Journals below a directory, without those of other inputs."""
    if directory is None:
        return None
    own = directory / key[:32]
    if directory.is_dir():
        for other in directory.iterdir():
            if other != own:
                shutil.rmtree(other, ignore_errors=True)
    return Journals(own)
