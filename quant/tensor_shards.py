"""Writes the tensors of a checkpoint as safetensors files, one after another, and their index."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from trtc.quant.checkpoint_files import INDEX

_METADATA = {"format": "pt"}
_PART_BYTES = 64 << 20
"""Tensors that are given one by one begin a new file when they are so many."""


class TensorShards:
    """Files below a directory, which exists. What is in memory is what is given at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[tuple[str, ...]] = []

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a file of tensors on the CPU; none is written of none."""
        if tensors:
            path = self._directory / _part(len(self._files))
            save_file(apart({name: tensors[name] for name in sorted(tensors)}), path, _METADATA)
            path.chmod(0o644)  # safetensors writes them for the owner alone
            self._files.append(tuple(sorted(tensors)))

    def write_each(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write tensors that come one by one, some in a file."""
        part: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            part[name] = tensor
            if sum(one.nbytes for one in part.values()) >= _PART_BYTES:
                self.write(part)
                part = {}
        self.write(part)

    def finish(self) -> None:
        """Rename the files to the hub's convention, which says how many there are, and write their
        index."""
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files):
            final = f"model-{number + 1:05}-of-{count:05}.safetensors"
            (self._directory / _part(number)).rename(self._directory / final)
            weight_map |= dict.fromkeys(names, final)
        size = sum(path.stat().st_size for path in self._directory.glob("model-*.safetensors"))
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True)
        (self._directory / INDEX).write_text(text + "\n", "utf-8")


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values, contiguous and in no memory that others are in: linears that share inputs
    share scales, and a file has no tensor twice."""
    found: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.contiguous()
        storage = own.untyped_storage().data_ptr()
        found[name] = own.clone() if storage in storages else own
        storages.add(storage)
    return found


def _part(number: int) -> str:
    return f"part-{number + 1:05}.safetensors"
