"""Checkpoints of a shape for vLLM: a configuration alone, or with the weights that trtc's
`--dummy-weights` gives the same linears."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trtc.builder.fills import dummy_fill
from trtc.protos.dtypes import DTypeName
from trtc.protos.plan import Weight
from trtc.runtime.dummy_weights import fill_weights

INDEX_FILE = "model.safetensors.index.json"
"""Of a checkpoint's tensors; written last."""
_STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
_TYPES: Mapping[DTypeName, torch.dtype] = {
    "f8e4m3": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
}


def write_configuration(directory: Path, config: Mapping[str, Any], *, fp8: bool) -> Path:
    """What vLLM needs to run a Llama with `--load-format dummy`."""
    directory.mkdir(parents=True, exist_ok=True)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    document = {**config, "head_dim": head_dim}
    if fp8:
        document["quantization_config"] = _STATIC_FP8
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def write_fp8_checkpoint(directory: Path, config: Mapping[str, Any]) -> Path:
    """The same with E4M3 linears, one scale a tensor, and all else in bf16; a file a layer."""
    write_configuration(directory, config, fp8=True)
    names: dict[str, str] = {}
    for number, tensors in enumerate(_files(config)):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, directory / name, {"format": "pt"})
        names.update(dict.fromkeys(tensors, name))
    index = {"metadata": {}, "weight_map": names}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return directory


def _files(config: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield {
        "model.embed_tokens.weight": _tensor("table", "bf16", (vocab, hidden)),
        "model.norm.weight": _tensor("norm", "bf16", (hidden,)),
        "lm_head.weight": _tensor("weight", "bf16", (vocab, hidden)),
    }
    for layer in range(config["num_hidden_layers"]):
        yield dict(_layer(config, f"model.layers.{layer}"))


def _layer(config: Mapping[str, Any], layer: str) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{layer}.{norm}.weight", _tensor("norm", "bf16", (hidden,))
    for name, shape in {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }.items():
        yield f"{layer}.{name}.weight", _tensor("weight", "f8e4m3", shape)
        yield f"{layer}.{name}.weight_scale", _tensor("weight_scale", "f32", (), depth=shape[1])
        yield f"{layer}.{name}.input_scale", _tensor("input_scale", "f32", ())


def _tensor(
    parameter: str, dtype: DTypeName, shape: tuple[int, ...], *, depth: int | None = None
) -> torch.Tensor:
    """What a parameter of one of trtc's kernels is filled with; `depth`: of what a scale is for."""
    axes = {"K": shape[-1] if depth is None else depth} if shape or depth else {}
    fill = dummy_fill(parameter, dtype, {"weight_dtype": "f8e4m3"} if depth else {}, axes)
    size = math.prod(shape) * _TYPES[dtype].itemsize
    weight = Weight(parameter, dtype, shape, "row_major", offset=0, bytes=size, fill=fill)
    return torch.from_numpy(fill_weights([weight], size)).view(_TYPES[dtype]).reshape(shape)
