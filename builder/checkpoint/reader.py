"""A checkpoint's tensors by name, streamed: one file or shards under an index."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from trtc.builder.checkpoint.safetensors import MappedFile, StoredTensor
from trtc.builder.recipes import Array
from trtc.protos.errors import CheckpointError
from trtc.protos.files import (
    MAX_JSON_BYTES,
    UnreadableError,
    check_unique_keys,
    decode_json,
    read_file,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_FILE_NAME = 128
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class SafetensorsReader:
    """Reads the tensors of a model directory; all headers are checked when it is made.

    Resident memory stays near the size of one tensor, or of those that are merged into one: each
    read first releases all pages that were touched (MADV_DONTNEED). Views stay valid; their pages
    are read again when they are used.

    Raises:
        CheckpointError: no safetensors, damaged files, an index that names absent shards or
            tensors, pickle-only weights.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # As in Transformers, a single file wins over an index beside it.
        is_single = (directory / SINGLE_FILE).is_file()
        self._index = {} if is_single else _read_index(directory)
        files = (SINGLE_FILE,) if is_single else sorted(set(self._index.values()))
        self._files = {file: MappedFile(directory / file) for file in files}
        self._file_of = self._locate()

    def _locate(self) -> dict[str, str]:
        located: dict[str, str] = {}
        for file, mapped in self._files.items():
            for name in mapped.tensors:
                if name in located:
                    raise CheckpointError(
                        f"tensor {name} is in {located[name]} and in {file}",
                        field=str(self.directory),
                        remedy="Remove the shard that does not belong to this checkpoint",
                    )
                located[name] = file
        for name, file in self._index.items():
            if name not in self._files[file].tensors:
                raise CheckpointError(
                    f"says that tensor {name} is in {file}, which does not have it",
                    field=str(self.directory / INDEX_FILE),
                    remedy="Download the index and the shards again, from one revision",
                )
        return located

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor of the checkpoint, sorted."""
        return tuple(sorted(self._file_of))

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(element type as safetensors spells it, shape) of every tensor by name, sorted."""
        stored = (self.stored(name) for name in self.names)
        return {tensor.name: (tensor.dtype, tensor.shape) for tensor in stored}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            tensor.end - tensor.begin
            for mapped in self._files.values()
            for tensor in mapped.tensors.values()
        )

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def stored(self, name: str) -> StoredTensor:
        """The header's entry of a tensor; reads no data.

        Raises:
            CheckpointError: no such tensor.
        """
        return self._file(name).tensors[name]

    def read(self, name: str) -> Array:
        """A read-only view of the tensor.

        Raises:
            CheckpointError: no such tensor.
        """
        file = self._file(name)
        self.release()
        return file.view(name)

    def release(self) -> None:
        """Release the pages of every tensor."""
        for file in self._files.values():
            file.release()

    def _file(self, name: str) -> MappedFile:
        if name not in self._file_of:
            raise CheckpointError(
                f"tensor {name} is missing",
                field=str(self.directory),
                remedy="Check that every shard is there and that config.json is of this model",
            )
        return self._files[self._file_of[name]]


def _read_index(directory: Path) -> Mapping[str, str]:
    """Tensor name -> file of every shard; all of them are there."""
    path = directory / INDEX_FILE
    if not path.is_file():
        raise _no_weights(directory)
    try:
        content = read_file(path, MAX_JSON_BYTES)
        weight_map = decode_json(content, _Index).weight_map
        check_unique_keys(content)
    except UnreadableError as error:
        raise CheckpointError(
            f"is not a safetensors index ({error})",
            field=str(path),
            remedy="Download the file again",
        ) from error
    for file in weight_map.values():
        if Path(file).name != file or len(file) > _MAX_FILE_NAME:
            raise CheckpointError(
                f"names the shard {file[:80]!r}, which is not a file name",
                field=str(path),
                remedy="Shards must lie beside their index",
            )
    absent = sorted({file for file in weight_map.values() if not (directory / file).is_file()})
    if absent:
        raise CheckpointError(
            f"names {len(absent)} shards that are not there: {', '.join(absent[:4])}",
            field=str(path),
            remedy="Download the missing shards",
        )
    return weight_map


def _no_weights(directory: Path) -> CheckpointError:
    pickles = sorted(file.name for pattern in _PICKLE_PATTERNS for file in directory.glob(pattern))
    if pickles:
        return CheckpointError(
            f"has only pickle weights ({pickles[0]}), which trtc refuses: "
            "unpickling a file runs any code that is in it",
            field=str(directory),
            remedy="Convert it where you trust it: load it with Transformers and save_pretrained()",
        )
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    found = f" (found {', '.join(others[:4])})" if others else ""
    return CheckpointError(
        f"has neither {SINGLE_FILE} nor {INDEX_FILE}{found}",
        field=str(directory),
        remedy="Give a directory that save_pretrained() wrote, or --dummy-weights to do without",
    )
