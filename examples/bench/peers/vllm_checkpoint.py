"""Checkpoints of a shape for vLLM: a configuration alone, or with the weights that trtc's
`--dummy-weights` gives the same linears."""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from examples.bench.peers.checkpoint import ModelShape
from trtc.builder.checkpoint.reader import INDEX_FILE
from trtc.builder.fills import dummy_fill
from trtc.protos.dtypes import DTypeName
from trtc.protos.plan import Weight
from trtc.runtime.executors.dummy_weights import fill_weights

STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
_TYPES: Mapping[DTypeName, torch.dtype] = {
    "f8e4m3": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
}


def write_configuration(
    directory: Path, config: Mapping[str, Any], quantization: Mapping[str, Any] | None = None
) -> Path:
    """What vLLM needs to run a shape with `--load-format dummy`."""
    directory.mkdir(parents=True, exist_ok=True)
    document = dict(config)
    if config["model_type"] == "llama":
        document["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if quantization is not None:
        document["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def write_fp8_checkpoint(directory: Path, config: Mapping[str, Any]) -> Path:
    """The same with E4M3 linears, one scale a tensor, and all else in bf16; a file a layer. Its
    INDEX_FILE is written last."""
    write_configuration(directory, config, STATIC_FP8)
    names: dict[str, str] = {}
    for number, (_, layer) in enumerate(groupby(_sizes(config), lambda one: one[0].split(".")[:3])):
        tensors = {name: tensor for one in layer for name, tensor in _stored(*one)}
        file = f"model-{number:05}.safetensors"
        save_file(tensors, directory / file, {"format": "pt"})
        names.update(dict.fromkeys(tensors, file))
    index = {"metadata": {}, "weight_map": names}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return directory


def _sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape = ModelShape(
        name=config["model_type"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        vocab=config["vocab_size"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
    )
    yield from shape.tensors()
    yield "lm_head.weight", (shape.vocab, shape.hidden)


def _stored(name: str, size: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight, and its scales if it is a layer's linear."""
    if "_proj" in name:
        yield name, _tensor("weight", "f8e4m3", size)
        yield f"{name}_scale", _tensor("weight_scale", "f32", (), depth=size[1])
        yield name.replace(".weight", ".input_scale"), _tensor("input_scale", "f32", ())
    elif len(size) == 1:
        yield name, _tensor("norm", "bf16", size)
    else:
        yield name, _tensor("table" if "embed" in name else "weight", "bf16", size)


def _tensor(
    parameter: str, dtype: DTypeName, shape: tuple[int, ...], *, depth: int | None = None
) -> torch.Tensor:
    """What a parameter of one of trtc's kernels is filled with; `depth`: of what a scale is for."""
    axes = {"K": shape[-1] if depth is None else depth} if shape or depth else {}
    fill = dummy_fill(parameter, dtype, {"weight_dtype": "f8e4m3"} if depth else {}, axes)
    size = math.prod(shape) * _TYPES[dtype].itemsize
    weight = Weight(parameter, dtype, shape, "row_major", offset=0, bytes=size, fill=fill)
    return torch.from_numpy(fill_weights([weight], size)).view(_TYPES[dtype]).reshape(shape)
