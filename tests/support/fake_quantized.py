"""A Transformers model that computes what a ModelOpt checkpoint says, by torch alone.

Weights are what their stored numbers stand for, and the inputs of linears are rounded as their
static scales say. It reads the exported tensors itself: nothing of trtc is in between.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers.cache_utils import DynamicCache

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_NO_BIAS = SimpleNamespace(bias=None)


def fake_quantized_logits(
    source: Path, quantized: Path, ids: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """Logits [len(ids), vocab] of `quantized`, whose architecture is that of `source`.

    Args:
        dtype: of activations and of dequantised weights.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(quantized.glob("*.safetensors")):
        tensors |= load_file(path)
    facts = json.loads((quantized / "hf_quant_config.json").read_text())["quantization"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in tensors and tensors[name].dtype not in (torch.uint8, *_LARGEST):
                parameter.copy_(tensors[name])
        for name, module in list(model.named_modules()):
            if f"{name}.weight_scale" in tensors:
                parent, _, child = name.rpartition(".")
                linear = FakeQuantizedLinear(name, tensors, facts["quant_algo"], module, dtype)
                setattr(model.get_submodule(parent), child, linear)
            elif isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter):
                parent, _, child = name.rpartition(".")
                experts = FakeQuantizedExperts(name, tensors, facts["quant_algo"], module, dtype)
                setattr(model.get_submodule(parent), child, experts)
        cache = Float8Cache(tensors) if facts["kv_cache_quant_algo"] == "FP8" else DynamicCache()
        return model(torch.tensor([ids]), past_key_values=cache).logits[0].float()


class FakeQuantizedLinear(torch.nn.Module):
    def __init__(
        self, name: str, tensors: dict[str, torch.Tensor], algo: str, like: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = _weight(name, tensors, algo, dtype)
        self.bias = like.bias
        self.pre_scale = tensors.get(f"{name}.pre_quant_scale")
        self.input_scale = tensors.get(f"{name}.input_scale")
        self.algo = algo
        self.code = torch.int8 if algo == "W8A8_SQ_PER_CHANNEL" else torch.float8_e4m3fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pre_scale is not None:
            x = x * self.pre_scale.to(x.dtype)
        if self.algo == "NVFP4":
            x = fake_quantize_blocks(x, self.input_scale)
        elif self.input_scale is not None:
            x = fake_quantize(x, self.input_scale, self.code)
        return torch.nn.functional.linear(x, self.weight, self.bias)


class FakeQuantizedExperts(torch.nn.Module):
    """Every expert's three linears, in the place of Transformers' fused module."""

    def __init__(
        self, name: str, tensors: dict[str, torch.Tensor], algo: str, like: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        linears = ("gate_proj", "up_proj", "down_proj")
        if f"{name}.0.gate_proj.weight" not in tensors:  # Mixtral's checkpoints have other names
            name = name.replace(".mlp.experts", ".block_sparse_moe.experts")
            linears = ("w1", "w3", "w2")
        self.act_fn = like.act_fn
        self.experts = [
            [
                FakeQuantizedLinear(f"{name}.{e}.{one}", tensors, algo, _NO_BIAS, dtype)
                for one in linears
            ]
            for e in range(len(like.gate_up_proj))
        ]

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for number, (gate, up, down) in enumerate(self.experts):
            rows, rank = torch.where(top_k_index == number)
            out = down(self.act_fn(gate(hidden[rows])) * up(hidden[rows]))
            total.index_add_(0, rows, out.float() * top_k_weights[rows, rank, None].float())
        return total.to(hidden.dtype)


class Float8Cache(DynamicCache):  # type: ignore[misc]
    """Keys and values as an FP8 pool gives them back."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._scales = {name: one for name, one in tensors.items() if name.endswith("_scale")}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *more: Any,
        **other: Any,
    ) -> Any:
        prefix = f"model.layers.{layer_idx}.self_attn"
        one = torch.ones(())
        keys, values = (
            fake_quantize(
                x,
                self._scales.get(f"{prefix}.{which}_proj.{which}_scale", one),
                torch.float8_e4m3fn,
            )
            for x, which in ((key_states, "k"), (value_states, "v"))
        )
        return super().update(keys, values, layer_idx, *more, **other)


def fake_quantize(x: torch.Tensor, scale: torch.Tensor, code: torch.dtype) -> torch.Tensor:
    """x rounded to the nearest code, ties to even, saturated; in x's type."""
    largest = _LARGEST[code]
    least = -128.0 if code is torch.int8 else -largest
    scaled = (x.float() / scale.float()).clamp(least, largest)
    codes = scaled.round() if code is torch.int8 else scaled.to(code).float()
    return (codes * scale.float()).to(x.dtype)


def fake_quantize_blocks(x: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """x [..., K] in blocks of 16: E4M3 scales in units of `unit`, E2M1 codes; in x's type."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1, keepdim=True) / 6 / unit).to(torch.float8_e4m3fn).float() * unit
    quotients = torch.where(scales > 0, blocks / scales, 0.0)
    distances = (quotients.abs().clamp(max=6.0).unsqueeze(-1) - _E2M1).abs()
    nearest = distances == distances.amin(-1, keepdim=True)
    # Of two that are as near, the even code.
    codes = (nearest * torch.tensor([2, 1, 2, 1, 2, 1, 2, 1])).argmax(-1)
    rounded = _E2M1[codes] * quotients.sign() * scales.to(x.dtype).float()
    return rounded.flatten(-2).to(x.dtype)


def _e2m1(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in / 2], low nibble first -> values [out, in]."""
    codes = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2).long()
    return _E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


def _weight(
    name: str, tensors: dict[str, torch.Tensor], algo: str, dtype: torch.dtype
) -> torch.Tensor:
    """[out, in]; scales of groups are rounded to `dtype` before they multiply."""
    stored, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    if algo == "FP8":
        return (stored.float() * scale).to(dtype)
    if algo == "NVFP4":
        units = (scale.float() * tensors[f"{name}.weight_scale_2"]).to(dtype).float()
        return (_e2m1(stored) * units.repeat_interleave(16, 1)).to(dtype)
    if algo == "W8A8_SQ_PER_CHANNEL":
        return (stored.float() * scale[:, None]).to(dtype)
    groups = scale.to(dtype).float().repeat_interleave(stored.shape[1] // scale.shape[1], 1)
    weight = (_nibbles(stored) * groups).to(dtype)
    if algo == "W4A16_AWQ":
        return weight
    assert algo == "W4A8_AWQ"
    return fake_quantize(weight, tensors[f"{name}.weight_scale_2"], torch.float8_e4m3fn)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [out / 2, in], low nibble first -> signed values [out, in]."""
    low, high = (packed & 0xF).to(torch.int8), (packed >> 4).to(torch.int8)
    rows = torch.stack([low, high], 1).reshape(-1, packed.shape[1])
    return torch.where(rows > 7, rows - 16, rows).float()
