"""E4M3 weights of a layer by GPTQ, with the scales that nvidia-modelopt gives them.

modelopt rounds the weights that it exports to nearest. So weights become what codes stand for, and
these are what it finds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trtc.quant.code_grid import E4M3
from trtc.quant.gptq import round_by_scales
from trtc.quant.input_sums import InputSums
from trtc.quant.layerwise import Site, Stream, find_stages
from trtc.quant.scheme import Gptq

Sums = Mapping[Site, InputSums]


def sums_of_sites(layer: nn.Module, names: Sequence[str], index: int, probe: Stream) -> Sums:
    """Nothing yet, for each of the inputs that quantised linears of a layer get.

    Args:
        names: of those that are, or could be.
    """
    quantized = [one for one in names if _module(layer, one).weight_quantizer.is_enabled]
    stages = find_stages(layer, quantized, index, probe) if quantized else ()
    return {site: InputSums() for stage in stages for site in stage}


def round_weights_of(layer: nn.Module, sums: Sums, settings: Gptq) -> None:
    """Replace the weights of calibrated linears by numbers that E4M3 has.

    Args:
        sums: of what the unquantised model gives them.

    Raises:
        CalibrationError: activations that are not finite.
    """
    for site, inputs in sums.items():
        _round([_module(layer, name) for name in site.linears], inputs, settings)


def _module(layer: nn.Module, name: str) -> Any:
    """A linear that modelopt has converted."""
    return layer.get_submodule(name)


def _round(linears: Sequence[Any], inputs: InputSums, settings: Gptq) -> None:
    """Linears of one site, as rows of one weight."""
    weight = torch.cat([one.weight.detach().float() for one in linears])
    scales = torch.cat([_scale(one).expand(len(one.weight), 1) for one in linears])
    statistics = inputs.statistics(weight.shape[1], weight.device)
    values = round_by_scales(weight, statistics, scales, settings, E4M3) * scales
    parts = torch.split(values, [len(one.weight) for one in linears])
    for linear, own in zip(linears, parts, strict=True):
        linear.weight.data.copy_(own)


def _scale(linear: Any) -> torch.Tensor:
    """[] f32, of its weight."""
    largest: torch.Tensor = linear.weight_quantizer.amax.float()
    return torch.where(largest > 0, largest / E4M3.numbers[-1], 1.0).reshape(())
