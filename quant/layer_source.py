"""Where the weights of decoder layers are: in memory, or in the checkpoint until a layer's turn
comes.

Transformers' own loading reads each part, so that tensors which it renames, merges or splits are
those of a model that is loaded whole, bit for bit.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from trtc.quant.device import Movable
from trtc.quant.experts import SeparateExperts, separated
from trtc.quant.partial_loading import PartialCheckpoint
from trtc.quant.reference_model import layer_prefixes


class LayerSource(Movable, Protocol):
    """A Transformers causal language model of which decoder layers may have no weights."""

    @property
    def model(self) -> Any:
        """It has all its weights but theirs, and in them what is computed from the config."""
        ...

    def held(self, index: int) -> AbstractContextManager[nn.Module]:
        """Context manager under which a decoder layer has its weights; it gives the layer."""
        ...

    def layers_only(self) -> AbstractContextManager[None]:
        """Context manager under which nothing but decoder layers is computed: what else the model
        has need not be on its device."""
        ...


@dataclass(frozen=True)
class WholeModel:
    """A model that is in memory."""

    model: Any

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.model)

    @property
    def bytes_at_work(self) -> int:
        return self.num_bytes

    @contextmanager
    def held(self, index: int) -> Iterator[nn.Module]:
        yield self.model.base_model.layers[index]

    def layers_only(self) -> AbstractContextManager[None]:
        return nullcontext()

    def to(self, device: str) -> None:
        self.model.to(device)


class LayeredModel:
    """A checkpoint of which one decoder layer at a time is in memory.

    Weights that stay as they are stored are mapped, not copied.

    Args:
        model_dir: the unquantised checkpoint.
        dtype: a torch name.

    Raises:
        CheckpointError, UnsupportedError: as `load_model`.
    """

    def __init__(self, model_dir: Path, dtype: str) -> None:
        self._device = "cpu"
        self._checkpoint = PartialCheckpoint(model_dir, dtype)
        self.model = self._checkpoint.without_layers()
        self._paths = [prefix.removesuffix(".") for prefix in layer_prefixes(self.model)]

    @property
    def num_bytes(self) -> int:
        layers = [_num_bytes(layer) for layer in self.model.base_model.layers]
        return max(_num_bytes(self.model) - sum(layers), *layers)

    @property
    def bytes_at_work(self) -> int:
        return max(_num_bytes(layer) for layer in self.model.base_model.layers)

    @contextmanager
    def layers_only(self) -> Iterator[None]:
        self._move_others("cpu")
        try:
            yield
        finally:
            self._move_others(self._device)

    @contextmanager
    def held(self, index: int) -> Iterator[nn.Module]:
        layer = self.model.base_model.layers[index]
        read = self._checkpoint.read(self._paths[index], self._device)
        for path, module in layer.named_modules():
            if isinstance(module, SeparateExperts):
                parent, _, name = path.rpartition(".")
                setattr(read.get_submodule(parent), name, separated(read.get_submodule(path)))
        weights = read.state_dict()
        del read
        empty = {path: _replace(layer, path, weight) for path, weight in weights.items()}
        del weights
        try:
            yield layer
        finally:
            for path, tensor in empty.items():
                _replace(layer, path, tensor)

    def to(self, device: str) -> None:
        self._device = device
        self.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))

    def _move_others(self, device: str) -> None:
        """Tables, mostly: buffers are small, and layers have some of their own."""
        for parameter in self.model.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)


def _num_bytes(module: nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in module.parameters())


def _replace(layer: nn.Module, path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Give a layer a tensor in place of another of this name, which is returned."""
    parent, _, name = path.rpartition(".")
    module = layer.get_submodule(parent)
    own: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    before: torch.Tensor = own[name]
    if isinstance(before, nn.Parameter):
        # PyTorch takes other kernels for some that need no gradients.
        tensor = nn.Parameter(tensor, before.requires_grad)
    own[name] = tensor
    return before
