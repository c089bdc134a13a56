"""8-bit weights, rounded to nearest: of int8 the gain of GPTQ is below the noise of measurements,
and E4M3 with scales of channels needs no text so. And activations, by row."""

import torch

from trtc.quant.gptq import Rounded
from trtc.quant.site_format import SiteFormat

_LARGEST_I8 = 127
_LEAST = 1e-10
"""Magnitude that the largest of a row counts as at least."""
_LARGEST_E4M3 = float(torch.finfo(torch.float8_e4m3fn).max)


def round_to_nearest(weight: torch.Tensor, to: SiteFormat) -> Rounded:
    """Round a weight to int8 or E4M3 codes, the largest of a group to the largest code.

    Args:
        weight: [N, K] f32; K is a multiple of the format's groups.
    """
    groups = weight.reshape(len(weight), -1, to.group_size or weight.shape[1])
    largest = _LARGEST_I8 if to.weight == "i8" else _LARGEST_E4M3
    scales = (groups.abs().amax(-1, keepdim=True) / largest).bfloat16().float()
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    values = (groups / scales).clamp_(-largest, largest).reshape(weight.shape)
    is_integer = to.weight == "i8"
    codes = values.round_().to(torch.int8) if is_integer else values.to(torch.float8_e4m3fn)
    return Rounded(codes, scales.squeeze(-1))


def round_rows(x: torch.Tensor, to: SiteFormat) -> torch.Tensor:
    """Activations [T, K] f32 as they are multiplied with such weights: each row in codes by its
    largest magnitude, and back."""
    largest = _LARGEST_I8 if to.weight == "i8" else _LARGEST_E4M3
    scales = x.abs().amax(-1, keepdim=True).clamp_(min=_LEAST) / largest
    values = (x / scales).clamp_(-largest, largest)
    codes = values.round_() if to.weight == "i8" else values.to(torch.float8_e4m3fn).float()
    return codes * scales
