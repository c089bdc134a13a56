"""Loads parts of a checkpoint as Transformers loads all of it.

Transformers renames, merges and splits tensors as it loads them (the experts of a layer become two
tensors). Its own functions do that here, given the tensors of one part: their results are, bit for
bit, those of a model that is loaded whole.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from trtc.quant.checkpoint_files import tensor_files
from trtc.quant.quiet import quiet_libraries
from trtc.quant.reference_model import (
    check_loaded,
    empty_model,
    finished,
    layer_prefixes,
    load_config,
    readable,
)

_META = "meta"


class PartialCheckpoint:
    """A checkpoint, and what Transformers makes of it.

    Args:
        model_dir: the unquantised checkpoint.
        dtype: a torch name.

    Raises:
        CheckpointError: unreadable, or with tensors missing or of the wrong shape.
        UnsupportedError: as `load_config`.
    """

    def __init__(self, model_dir: Path, dtype: str) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._model_dir = model_dir
        self._dtype: torch.dtype = getattr(torch, dtype)
        config = load_config(model_dir)
        config.name_or_path = str(model_dir)
        self._empty = empty_model(config, self._dtype)
        with quiet_libraries(), readable(model_dir):
            self._files = tensor_files(model_dir)
            self._conversions = get_model_conversion_mapping(self._empty)
            self._targets = self._find_targets()
            with self._opened(self._files) as stored:
                # Their shapes alone, to check all before the work.
                shapes = {
                    key: torch.empty(one.get_shape(), dtype=self._dtype, device=_META)
                    for key, one in stored.items()
                }
            info = self._load(self._empty, shapes, _META)
            self._empty.mark_tied_weights_as_initialized(info)
            self._empty.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
            self._empty._adjust_missing_and_unexpected_keys(info)
        check_loaded(model_dir, info.missing_keys, info.mismatched_keys)

    def without_layers(self) -> Any:
        """A new model whose decoder layers have no weights: they are on the meta device.

        Everything else is there, and in the layers what is computed from the config.
        """
        model = copy.deepcopy(self._empty)
        with quiet_libraries(), readable(self._model_dir):
            model._move_missing_keys_from_meta_to_device(set(), None, None, None)
            for tensor in model.state_dict(keep_vars=True).values():
                tensor._is_hf_initialized = True
            model._initialize_missing_keys(is_quantized=False)
            model = finished(model)
            layers = layer_prefixes(model)
            outside = [key for key, name in self._targets.items() if not name.startswith(layers)]
            with self._opened(outside) as stored:
                info = self._load(model, stored, "cpu")
            model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        return model

    def read(self, path: str, device: str) -> nn.Module:
        """The module of a path in the model, with its weights on a device.

        Weights that are stored as they are used are mapped, not copied, on the CPU.
        """
        parent, _, name = path.rpartition(".")
        module: nn.Module = self._empty.get_submodule(path)
        empty = copy.deepcopy(module)
        keys = [key for key, target in self._targets.items() if target.startswith(f"{path}.")]
        with quiet_libraries(), self._opened(keys) as stored:
            self._load(self._empty, stored, device)
        setattr(self._empty.get_submodule(parent), name, empty)
        return module

    def _find_targets(self) -> dict[str, str]:
        """The name in the model of each tensor, of those that it becomes the first."""
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        renamings = [one for one in self._conversions if isinstance(one, WeightRenaming)]
        converters = [one for one in self._conversions if isinstance(one, WeightConverter)]
        known, prefix = self._empty.state_dict(), self._empty.base_model_prefix
        found = {}
        for key in self._files:
            name, _ = rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, _ = rename_source_key(key, [], [], prefix, known)
            found[key] = name
        return found

    @contextmanager
    def _opened(self, keys: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Tensors of the checkpoint, to be read or mapped where they are used."""
        with ExitStack() as stack:
            paths = dict.fromkeys(self._files[key] for key in keys)
            files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in paths}
            yield {key: files[self._files[key]].get_slice(key) for key in keys}

    def _load(self, model: Any, tensors: dict[str, Any], device: str) -> Any:
        """Load tensors into a model, and say what is missing of it."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        settings = LoadStateDictConfig(
            dtype=self._dtype,
            dtype_plan=model._get_dtype_plan(self._dtype),
            device_map={"": torch.device(device)},
            weight_mapping=self._conversions,
        )
        info, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
        return info
