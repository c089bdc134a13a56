"""Writes a model that nvidia-modelopt quantises as its unified Hugging Face checkpoint, a file a
decoder layer."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trtc.quant.joined_convolutions import split_convolutions
from trtc.quant.quiet import quiet_libraries
from trtc.quant.reference_model import layer_prefixes
from trtc.quant.tensor_shards import TensorShards


class ModeloptCheckpoint:
    """A checkpoint that is written layer by layer.

    Args:
        model: a Transformers model, converted by modelopt.
        output_dir: exists.
    """

    def __init__(self, model: Any, output_dir: Path) -> None:
        self._model = model
        self._output_dir = output_dir
        self._shards = TensorShards(output_dir)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of a layer, given by their names in the model and on the CPU."""
        self._shards.write(self._stored(tensors))

    def finish(self) -> None:
        """Write what is outside the layers, the index and the configs."""
        self._shards.write_each(self._others())
        self._shards.finish()
        self._write_configs()

    def _others(self) -> Iterator[tuple[str, torch.Tensor]]:
        layers = layer_prefixes(self._model)
        tied = self._model.all_tied_weights_keys
        for name, tensor in self._model.state_dict().items():
            if not name.startswith(layers) and name not in tied:
                yield from self._stored({name: tensor.cpu()}).items()

    def _stored(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By the names of the checkpoint that the model was read from, which has some
        tensors in parts."""
        with quiet_libraries():
            from modelopt.torch.export.quant_aware_conversion import (
                revert_weight_conversion_quant_aware,
            )

            with split_convolutions(self._model):
                return dict(revert_weight_conversion_quant_aware(self._model, dict(tensors)))

    def _write_configs(self) -> None:
        """config.json and hf_quant_config.json, which say which linears are quantised and how.

        The model's quantisers say it as soon as it is converted: layers may come from a journal.
        """
        model = self._model
        with quiet_libraries():
            from modelopt.torch.export.quant_aware_conversion import (
                build_reverse_name_mapper,
                revert_quant_config_names,
            )
            from modelopt.torch.export.quant_utils import get_quant_config
            from modelopt.torch.export.unified_export_hf import _write_hf_export_config

            declared = get_quant_config(model)
            revert_quant_config_names(declared["quantization"], build_reverse_name_mapper(model))
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(self._output_dir)
            _write_hf_export_config(model, declared, self._output_dir)
