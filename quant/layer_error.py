"""The error of each quantised linear's output, for its inputs in the quantised model."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trtc.protos.manifest import LayerError
from trtc.quant.layerwise import Stream, advance

_SILENT_DB = 200.0
"""Reported when quantisation changes nothing: more than f32 can resolve."""


class Meter:
    """Accumulates the error of a linear's output against that of its unquantised weight."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._signal = 0.0
        self._noise = 0.0
        self._largest = 0.0

    def add(self, exact: torch.Tensor, output: torch.Tensor) -> None:
        """Outputs [..., N] of the same inputs; there may be none."""
        if not output.numel():
            return
        error = output.float() - exact
        self._signal += float(exact.double().square().sum())
        self._noise += float(error.double().square().sum())
        self._largest = max(self._largest, float(error.abs().max()))

    def result(self) -> LayerError | None:
        """None if it got no held-out token (an expert)."""
        if self._signal == 0.0:
            return None
        ratio = self._signal / self._noise if self._noise else math.inf
        decibels = min(10 * math.log10(ratio), _SILENT_DB) if ratio else -_SILENT_DB
        return LayerError(
            layer=self._name,
            sqnr_db=round(decibels, 3),
            max_abs_error=float(f"{self._largest:.6g}"),
        )


class _ModeloptMeter(Meter):
    """A forward hook of a linear of modelopt's, which has its unquantised weight too."""

    def __call__(self, linear: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        x = inputs[0].float()
        scale = linear.input_quantizer.pre_quant_scale
        # The smoothed weight expects its input scaled: this is part of the layer, not its error.
        x = x if scale is None else x * scale.float()
        bias = None if linear.bias is None else linear.bias.float()
        self.add(functional.linear(x, linear.weight.float(), bias), output)


def measure_layer(
    layer: nn.Module, prefix: str, index: int, stream: Stream
) -> tuple[LayerError, ...]:
    """Errors of every quantised linear of a layer of a modelopt model, in its order.

    Each linear is compared on the input that it gets in the quantised model, so that its error does
    not include those of the layers before it.

    Args:
        prefix: what names within the layer begin with in the model.
        stream: taken through the layer.
    """
    meters = [
        (_ModeloptMeter(prefix + name), module)
        for name, module in layer.named_modules()
        if _is_quantized_linear(module)
    ]
    handles = [module.register_forward_hook(meter) for meter, module in meters]
    advance(layer, index, stream)
    for handle in handles:
        handle.remove()
    results = (meter.result() for meter, _ in meters)
    return tuple(result for result in results if result is not None)


def _is_quantized_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear) and bool(
        getattr(getattr(module, "weight_quantizer", None), "is_enabled", False)
    )
