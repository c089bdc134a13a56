"""How much memory nvidia-modelopt's calibrations take beside the weights that they are given."""

from pathlib import Path

from torch import nn

from trtc.quant.calibration_text import WINDOW
from trtc.quant.evaluation import MAX_TOKENS
from trtc.quant.experts import separate_experts
from trtc.quant.layerwise import BATCH
from trtc.quant.reference_model import empty_model, load_config

_F32, _BF16 = 4, 2
_PACKED = 1
"""Bytes of a quantised weight, at most."""
_COPIES = 4
"""In f32, of a weight [N, K] while it is rounded."""
_SQUARES = 3
"""Matrices [K, K] of the linear that is rounded by GPTQ, beside its sums."""
_WIDE = 4
"""Activations of a layer's widest linear that are held at once, as an MLP's are."""


def modelopt_bytes(model_dir: Path, num_tokens: int, *, searches: bool, rounds: bool) -> int:
    """An estimate, from the shapes of the largest decoder layer. No weights are read.

    Args:
        num_tokens: of the calibration text, at most.
        searches: whether AWQ's scales are searched, for which all of the text is computed at once.
        rounds: whether weights are rounded by the products of their inputs.

    Raises:
        CheckpointError, UnsupportedError: as `linear_shapes`.
    """
    model = empty_model(load_config(model_dir))
    separate_experts(model)
    hidden_size: int = model.config.get_text_config().hidden_size
    streams = num_tokens * (2 if searches else 1) + MAX_TOKENS
    rows = num_tokens if searches else BATCH * WINDOW
    layers = (
        _layer_bytes(layer, rows, searches) + rounds * _rounding_bytes(layer)
        for layer in model.base_model.layers
    )
    return _BF16 * streams * hidden_size + max(layers)


def _layer_bytes(layer: nn.Module, rows: int, searches: bool) -> int:
    """What is held at once for a layer, and `rows` tokens in it."""
    shapes = [one.weight.shape for one in layer.modules() if isinstance(one, nn.Linear)]
    depth = max(columns for _, columns in shapes)
    widest = max(max(shape) for shape in shapes)
    largest = max(shape.numel() for shape in shapes)
    packed = _PACKED * sum(shape.numel() for shape in shapes)
    gram = _F32 * (depth * depth + rows * depth) if searches else 0
    return packed + _BF16 * _WIDE * rows * widest + _F32 * _COPIES * largest + gram


def _rounding_bytes(layer: nn.Module) -> int:
    """Of the products of all inputs, and of those of the deepest linear while it is rounded."""
    squares = {
        (name.rpartition(".")[0], one.in_features): one.in_features**2
        for name, one in layer.named_modules()
        if isinstance(one, nn.Linear)
    }
    return _F32 * (sum(squares.values()) + _SQUARES * max(squares.values()))
