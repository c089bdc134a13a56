"""NVFP4 fake quantisation on any device. nvidia-modelopt has a kernel for GPUs only, and calls this
one instead."""

from typing import Any

import torch

BACKEND = "trtc_nvfp4"
"""What a quantiser's config names, so that modelopt calls `fake_quantize`."""
_BLOCK = 16
_E2M1_MAX, _E4M3_MAX, _E4M3_MIN = 6.0, 448.0, 2.0**-9
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values by code; between two, the even code wins."""


def fake_quantize(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """x [..., K] as NVFP4 gives it back: E2M1 in blocks of 16, each by an E4M3 scale in units of
    the tensor's own.

    Args:
        quantizer: a TensorQuantizer with an amax, the tensor's largest value.
    """
    unit = quantizer.amax.float() / (_E2M1_MAX * _E4M3_MAX)
    blocks = x.float().reshape(*x.shape[:-1], -1, _BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / _E2M1_MAX / unit
    scale = torch.where(
        scale == 0, torch.ones((), device=scale.device), scale.clamp(_E4M3_MIN, _E4M3_MAX)
    )
    scale = scale.to(torch.float8_e4m3fn).float() * unit
    rounded: torch.Tensor = _round_e2m1(blocks / scale) * scale
    return rounded.reshape(x.shape).to(x.dtype)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(_E2M1, device=x.device)
    edges = (values[1:] + values[:-1]) / 2
    size = x.abs().clamp(max=_E2M1_MAX)
    code = torch.searchsorted(edges, size)
    is_tie_above_odd = torch.isin(size, edges[1::2])
    return torch.sign(x) * values[code + is_tie_above_odd]
