"""Writes rounded weights as a compressed-tensors checkpoint, a file a decoder layer.

compressed-tensors' formats are what Transformers, vLLM and SGLang read. Beside each rounded
linear's tensors, which are of integers (`pack-quantized`) and of E4M3 codes (`float-quantized`)

    weight_packed i32 [N, K*bits/32], weight_scale bf16 [N, K/group_size], weight_shape i64 [2]
    weight F8_E4M3 [N, K], weight_scale bf16 [N, 1]

of the codes of plugins/iq4.py, in a layout that builds alone read (`iq4-packed`),

    weight_packed i32 [N, K/8], weight_scale u8 [N, K/group_size], weight_scale_2 f32 [],
    weight_shape i64 [2]

or, where activations are quantised by row, of int8 (`int-quantized`)

    weight i8 [N, K], weight_scale bf16 [N, 1]

which may be rotated, as a transform_config says then (quant/formats/transforms.py);

every other tensor is as the source has it, floating-point ones in bf16.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trtc.plugins.iq4 import scale_codes
from trtc.protos.errors import UnsupportedError
from trtc.quant.checkpoint_files import tensor_files
from trtc.quant.formats.compressed_tensors import IQ4_PACKED
from trtc.quant.formats.transforms import TRANSFORMS, declared_rotation
from trtc.quant.fused_experts import DOWN, EXPERTS, FUSED_EXPERTS, FUSED_GATELESS
from trtc.quant.gptq import Rounded
from trtc.quant.packed_codes import pack_codes
from trtc.quant.plain_names import plain_name
from trtc.quant.site_format import SiteFormat
from trtc.quant.tensor_shards import TensorShards

_PACKED, _FLOAT, _INTEGER = "pack-quantized", "float-quantized", "int-quantized"
_SEVERAL = "mixed-precision"


@dataclass(frozen=True)
class _Stored:
    """Tensors of the source."""

    file_of: Mapping[str, Path]
    """By name."""

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.file_of[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor.bfloat16() if tensor.is_floating_point() else tensor


class PackedCheckpoint:
    """A checkpoint that is written layer by layer.

    Args:
        model_dir: the unquantised checkpoint.
        output_dir: exists.
        formats: of the linears that will be given, by their names in Transformers' model.
        rounds_rows: whether their activations are quantised to the weights' types, by row; formats
            are of 8 bits then.
        hadamard: input channels that were rotated together in the weights, and are to be in the
            activations before they are quantised; 0: none.

    Raises:
        UnsupportedError: the source has no tensor of its own for a linear.
    """

    def __init__(
        self,
        model_dir: Path,
        output_dir: Path,
        formats: Mapping[str, SiteFormat],
        *,
        rounds_rows: bool = False,
        hadamard: int = 0,
    ) -> None:
        self._model_dir = model_dir
        self._output_dir = output_dir
        self._formats = formats
        self._rounds_rows = rounds_rows
        self._hadamard = hadamard
        self._source = _Stored(tensor_files(model_dir))
        self._stored_as, self._taken_apart = _stored_names(list(formats), self._source.file_of)
        self._shards = TensorShards(output_dir)

    def add(self, linears: Mapping[str, Rounded]) -> None:
        """Write the rounded linears of a layer."""
        tensors: dict[str, torch.Tensor] = {}
        for name, rounded in linears.items():
            prefix = self._stored_as[name]
            tensors |= {f"{prefix}.{key}": scale for key, scale in _scales(rounded).items()}
            if rounded.codes.is_floating_point() or self._rounds_rows:
                tensors[f"{prefix}.weight"] = rounded.codes
                continue
            tensors[f"{prefix}.weight_packed"] = pack_codes(rounded.codes, self._formats[name])
            tensors[f"{prefix}.weight_shape"] = torch.tensor(rounded.codes.shape)
        self._shards.write(tensors)

    def finish(self, ignored: Sequence[str], kv_scales: Mapping[str, float]) -> None:
        """Write the tensors that stay as they are, the index and config.json.

        Args:
            ignored: linears that are not quantised.
            kv_scales: by names of tensors; empty: the KV cache is not quantised.
        """
        self._shards.write_each(self._others(kv_scales))
        self._shards.finish()
        config = json.loads((self._model_dir / "config.json").read_text("utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = "bfloat16"
        config["quantization_config"] = self._declared(ignored, bool(kv_scales))
        text = json.dumps(config, indent=2, sort_keys=True)
        (self._output_dir / "config.json").write_text(text + "\n", "utf-8")

    def _others(self, kv_scales: Mapping[str, float]) -> Iterator[tuple[str, torch.Tensor]]:
        rounded = {f"{prefix}.weight" for prefix in self._stored_as.values()}
        for name in sorted(set(self._source.file_of) - rounded - self._taken_apart):
            yield name, self._source.read(name)
        for name, scale in sorted(kv_scales.items()):
            yield name, torch.tensor(scale)

    def _declared(self, ignored: Sequence[str], quantized_kv: bool) -> dict[str, Any]:
        """config.json's quantization_config."""
        groups = {}
        used = list(dict.fromkeys(self._formats.values()))
        for number, one in enumerate(used):
            names = sorted(name for name, its in self._formats.items() if its == one)
            stored = sorted({*names, *(self._stored_as[name] for name in names)})
            groups[f"group_{number}"] = {
                "targets": ["Linear"] if len(used) == 1 else stored,
                "weights": _weights(one),
                "input_activations": _activations(one) if self._rounds_rows else None,
                "format": _format(one, rounds_rows=self._rounds_rows),
            }
        layouts = {group["format"] for group in groups.values()}
        kv = {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "symmetric": True,
            "dynamic": False,
        }
        rotation = declared_rotation(self._hadamard, ignored) if self._hadamard else {}
        return {
            "quant_method": "compressed-tensors",
            "format": layouts.pop() if len(layouts) == 1 else _SEVERAL,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignored),
            "kv_cache_scheme": kv if quantized_kv else None,
            **({TRANSFORMS: rotation} if rotation else {}),
        }


def _stored_names(
    linears: Sequence[str], tensors: Mapping[str, Path]
) -> tuple[dict[str, str], frozenset[str]]:
    """What linears are called in the written checkpoint, and tensors of experts that they replace.

    Raises:
        UnsupportedError: the source has no tensor for a linear, or has it in one with others.
    """
    stored: dict[str, str] = {}
    for tensor in tensors:
        stored.setdefault(plain_name(tensor), tensor)
    found: dict[str, str] = {}
    fused: set[str] = set()
    for name in linears:
        own = stored.get(f"{plain_name(name)}.weight")
        if own is not None:
            found[name] = own.removesuffix(".weight")
        else:
            found[name], tensor = _of_fused(name, stored)
            fused.add(tensor)
    return found, frozenset(fused)


def _of_fused(name: str, stored: Mapping[str, str]) -> tuple[str, str]:
    """The name of an expert's linear, and of the tensor that has it of all experts."""
    module, _, within = plain_name(name).rpartition(f".{EXPERTS}.")
    for gate_up, down in (*FUSED_EXPERTS, *FUSED_GATELESS):
        part = down if within.endswith(f".{DOWN}") else gate_up
        tensor = stored.get(f"{module}.{part}")
        if module and tensor is not None:
            return f"{tensor.removesuffix(part)}{EXPERTS}.{within}", tensor
    raise UnsupportedError(
        "has no tensor of its own in the checkpoint",
        field=name,
        remedy="Quantise with --dtype int4_awq",
    )


def _scales(rounded: Rounded) -> dict[str, torch.Tensor]:
    unit = rounded.scale_unit
    if unit is None:
        return {"weight_scale": rounded.scales.bfloat16()}
    return {
        "weight_scale": torch.from_numpy(scale_codes(rounded.scales.numpy(), unit.numpy())),
        "weight_scale_2": unit.clone(),  # linears of a site share it, and files may not
    }


def _format(one: SiteFormat, *, rounds_rows: bool) -> str:
    if rounds_rows and one.weight == "i8":
        return _INTEGER
    return {"f8e4m3": _FLOAT, "iq4": IQ4_PACKED}.get(one.weight, _PACKED)


def _activations(one: SiteFormat) -> dict[str, Any]:
    """compressed-tensors' QuantizationArgs of what such weights multiply."""
    return {**_weights(one), "strategy": "token", "dynamic": True}


def _weights(one: SiteFormat) -> dict[str, Any]:
    """compressed-tensors' QuantizationArgs."""
    return {
        "num_bits": one.code_bits,
        "type": "float" if one.weight == "f8e4m3" else "int",
        "symmetric": True,
        "strategy": "group" if one.group_size else "channel",
        "group_size": one.group_size,
        "dynamic": False,
    }
