"""trtc's `--dummy-weights` for a model of vLLM, written over its parameters before vLLM brings them
into the layouts of its kernels.

vLLM's own `--load-format dummy` leaves E2M1 weights zero and rounds 98% of E4M3 weights to zero:
experts add nothing to tell rows apart, and these choose few.
"""

from collections.abc import Mapping

import torch
from torch import nn

from trtc.builder.fills import dummy_fill
from trtc.protos.dtypes import DTypeName
from trtc.protos.plan import Fill, Weight
from trtc.quant.formats.mxfp4 import GROUP
from trtc.runtime.executors.dummy_weights import fill_weights

_TYPES: Mapping[torch.dtype, DTypeName] = {
    torch.float8_e4m3fn: "f8e4m3",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.uint8: "u8",
}
_FIXED: Mapping[str, float] = {"A_log": 0.0}
"""Parameters that trtc stores otherwise: log(-rate), whose rate is -1."""
_KEPT = ("q_scale", "k_scale", "v_scale", "prob_scale")
"""Of keys and values, which are one where a checkpoint has none."""
_BLOCK_BYTES = 1 << 22


@torch.no_grad()
def fill_model(model: nn.Module) -> None:
    """Draw all parameters, as they are in a checkpoint: [out, in], or [experts, out, in]."""
    blocks: dict[Fill, torch.Tensor] = {}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            if name in _KEPT:
                continue
            fill = parameter_fill(f"{path}.{name}", parameter, own)
            if fill not in blocks:
                blocks[fill] = _block(fill).to(parameter.device)
            _repeat(blocks[fill], parameter.data.view(-1).view(torch.uint8))


def parameter_fill(path: str, parameter: torch.Tensor, beside: Mapping[str, torch.Tensor]) -> Fill:
    """The distribution of one parameter.

    Args:
        path: its name in the model.
        beside: the parameters of its module, among which a scale finds its weight.
    """
    name, dtype = path.rpartition(".")[2], _TYPES[parameter.dtype]
    if name in _FIXED:
        return Fill(element=dtype, center=_FIXED[name])
    if name.endswith("input_scale"):
        return dummy_fill("input_scale", dtype, {}, {})
    if name.endswith("weight_scale"):
        weight = beside[name.removesuffix("_scale")]
        return dummy_fill("weight_scale", dtype, _attributes(weight), {"K": _depth(weight)})
    if name.endswith("bias"):
        return dummy_fill("bias", dtype, {}, {})
    if not name.endswith("weight") or parameter.ndim == 1:
        return dummy_fill("norm", dtype, {}, {})
    if "embed" in path:
        return dummy_fill("table", dtype, {}, {})
    return dummy_fill("weight", dtype, _attributes(parameter), {"K": _depth(parameter)})


def _attributes(weight: torch.Tensor) -> dict[str, int | str]:
    if weight.dtype == torch.uint8:
        return {"weight_dtype": "f4e2m1", "group_size": GROUP}
    return {"weight_dtype": _TYPES[weight.dtype]}


def _depth(weight: torch.Tensor) -> int:
    """Of a sum; E2M1 weights are two a byte."""
    return weight.shape[-1] * (2 if weight.dtype == torch.uint8 else 1)


def _block(fill: Fill) -> torch.Tensor:
    weight = Weight("", "u8", (_BLOCK_BYTES,), "row_major", 0, _BLOCK_BYTES, fill)
    return torch.from_numpy(fill_weights([weight], _BLOCK_BYTES))


def _repeat(block: torch.Tensor, area: torch.Tensor) -> None:
    for start in range(0, len(area), len(block)):
        piece = area[start : start + len(block)]
        piece.copy_(block[: len(piece)])
