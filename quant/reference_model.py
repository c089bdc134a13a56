"""The unquantised checkpoint under Transformers: the reference of calibration and accuracy."""

import contextlib
import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trtc.protos.errors import CheckpointError, UnsupportedError
from trtc.quant.calibration_text import TokenSet
from trtc.quant.device import device_of
from trtc.quant.quiet import quiet_libraries

_MAX_F32_PARAMETERS = 100_000_000
"""Up to here the reference computes in f32; beyond it in the checkpoint's bf16, whose weights are
mapped and not copied.
A fixed number, so that a report does not depend on the memory of the machine that wrote it."""

_SAME_TYPES = {"kimi_k2": "deepseek_v3"}
"""Values of model_type that Transformers does not know, and those of the same models."""


def load_config(model_dir: Path) -> Any:
    """The checkpoint's Transformers config.

    Raises:
        CheckpointError: unreadable config.json.
        UnsupportedError: Transformers has no such model; or it is quantised already.
    """
    import transformers

    with quiet_libraries(), readable(model_dir):
        fields, _ = transformers.PreTrainedConfig.get_config_dict(model_dir, local_files_only=True)
        if (known := _SAME_TYPES.get(str(fields.get("model_type")))) is not None:
            alike = type(transformers.AutoConfig.for_model(known))
            config = alike.from_dict({**fields, "model_type": known})
        else:
            config = transformers.AutoConfig.from_pretrained(model_dir, local_files_only=True)
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UnsupportedError(
            f"is already quantised ({method})",
            field=str(model_dir),
            remedy="`trtc build` reads it as it is; to quantise, give the original checkpoint",
        )
    return config


def empty_model(config: Any, dtype: Any = None) -> Any:
    """Transformers' causal language model of a config, without weights, on the meta device.

    Args:
        dtype: a torch.dtype; None: the config's.

    Raises:
        UnsupportedError: Transformers has none.
    """
    import torch
    import transformers

    found = _model_class(config)
    make = found.from_config if found is transformers.AutoModelForCausalLM else found._from_config
    with quiet_libraries(), torch.device("meta"):
        return _with_base(make(config) if dtype is None else make(config, dtype=dtype))


def _model_class(config: Any) -> Any:
    """AutoModelForCausalLM, or the class that it does not list (Mistral 4).

    Raises:
        UnsupportedError: Transformers has none.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    name = f"{type(config).__name__.removesuffix('Config')}ForCausalLM"
    found = getattr(transformers, name, None)
    if found is None:
        raise UnsupportedError(
            f"is of type {config.model_type}, which Transformers does not generate text with",
            field="config.json: model_type",
            remedy="Build without a calibration, or with --eval-tokens 0",
        )
    return found


def load_model(model_dir: Path, dtype: str) -> Any:
    """The checkpoint as a Transformers causal language model in `dtype`, a torch name.

    Raises:
        CheckpointError: unreadable, or with tensors missing or of the wrong shape.
        UnsupportedError: as `load_config`.
    """
    import torch

    config = load_config(model_dir)
    with quiet_libraries(), readable(model_dir):
        model, info = _model_class(config).from_pretrained(
            model_dir,
            config=config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    check_loaded(model_dir, info.get("missing_keys") or (), info.get("mismatched_keys") or ())
    return finished(model)


def check_loaded(model_dir: Path, missing: Collection[Any], mismatched: Collection[Any]) -> None:
    """Refuse a checkpoint without all tensors of its model.

    Raises:
        CheckpointError: names some of the tensors.
    """
    for problem, found in (("missing", missing), ("mismatched", mismatched)):
        if names := sorted(str(name) for name in found):
            raise CheckpointError(
                f"tensors are {problem}: {', '.join(names[:4])}",
                field=str(model_dir),
                remedy="Download the checkpoint again",
            )


def finished(model: Any) -> Any:
    """A loaded model as everything here takes it."""
    # export_hf_checkpoint needs it, and configs made in code lack it.
    model.config.architectures = model.config.architectures or [type(model).__name__]
    return _with_base(model).eval()


def _with_base(model: Any) -> Any:
    """A model whose `base_model` is the one without the lm_head: Llama 4's has the name that it has
    within a model of several parts."""
    if not hasattr(model, model.base_model_prefix):
        model.base_model_prefix = "model"
    return model


def layer_prefixes(model: Any) -> tuple[str, ...]:
    """What the names of each decoder layer's modules begin with, in a finished model."""
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(f"{names[id(layer)]}." for layer in model.base_model.layers)


@contextlib.contextmanager
def readable(model_dir: Path) -> Iterator[None]:
    """Transformers raises many exceptions for bad directories; say which directory it was."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CheckpointError(
            f"Transformers cannot load it: {first_line}", field=str(model_dir)
        ) from error


def reference_dtype(model_dir: Path) -> str:
    """The torch dtype that the reference computes in."""
    model = empty_model(load_config(model_dir))
    small = sum(parameter.numel() for parameter in model.parameters()) <= _MAX_F32_PARAMETERS
    return "float32" if small else "bfloat16"


def sample_sequences(model: Any, *, count: int, length: int, seed: int) -> TokenSet:
    """Sequences drawn from the model itself, for a checkpoint that has no tokenizer.

    Text that the model finds likely exercises its activations as real text does, which random
    token ids do not (Williams et al. 2024, "Self-calibration for language model quantization").

    Args:
        model: a Transformers causal language model.
        length: of every sequence; the first token is drawn uniformly.

    Raises:
        CheckpointError: a model that gives NaN or infinity.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.randint(0, vocab_size, (count, 1), generator=generator)
    columns, cache, device = [tokens], None, device_of(model)
    with torch.inference_mode():
        for _ in range(length - 1):
            step = model(columns[-1].to(device), past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            # Drawn on the CPU, whose random numbers are the same everywhere.
            logits = step.logits[:, -1].float().cpu()
            if not bool(logits.isfinite().all()):
                raise CheckpointError(
                    "gives logits that are not finite",
                    field=str(model.config.name_or_path),
                    remedy="Its weights are damaged: download the checkpoint again",
                )
            probabilities = torch.softmax(logits, dim=-1)
            columns.append(torch.multinomial(probabilities, 1, generator=generator))
    sequences = torch.cat(columns, dim=1).to(torch.int32).numpy()
    digest = hashlib.sha256(np.ascontiguousarray(sequences).tobytes()).hexdigest()
    return TokenSet("model", digest, tuple(sequences))
