"""How much memory GPTQ takes beside the weights that it is given."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from trtc.quant.evaluation import MAX_TOKENS
from trtc.quant.experts import separate_experts
from trtc.quant.reference_model import empty_model, layer_prefixes, load_config
from trtc.quant.site_format import SiteFormat

_F32 = 4
_STREAMS = 2
"""Hidden states of the calibration text: of the unquantised model, and of the rounded one."""
_SQUARES = 1
"""Matrices [K, K] of the linear that is rounded, beside its sums."""
_COPIES = 4
"""Of a weight [N, K], while it is rounded."""


def gptq_bytes(model_dir: Path, formats: Mapping[str, SiteFormat], num_tokens: int) -> int:
    """An estimate, from the shapes of the largest decoder layer. No weights are read.

    What is written of the layer before is left out: on a GPU it is in the CPU's memory, and on a
    CPU it is written long before a layer comes to its largest linear.

    Args:
        formats: of the linears that are rounded, by name.
        num_tokens: of the calibration text, at most.

    Raises:
        CheckpointError, UnsupportedError: as `linear_shapes`.
    """
    model = empty_model(load_config(model_dir))
    separate_experts(model)
    hidden_size: int = model.config.get_text_config().hidden_size
    hidden = (_STREAMS * num_tokens + MAX_TOKENS) * hidden_size
    layers = [
        _layer_values(layer, prefix, formats, num_tokens)
        for layer, prefix in zip(model.base_model.layers, layer_prefixes(model), strict=True)
    ]
    return _F32 * (hidden + max(layers))


def _layer_values(
    layer: nn.Module, prefix: str, formats: Mapping[str, SiteFormat], num_tokens: int
) -> int:
    """Values that are held at once for a layer."""
    linears = {
        name: module
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and prefix + name in formats
    }
    rows: dict[tuple[str, int], int] = {}
    sums: dict[tuple[str, int], int] = {}
    for name, linear in linears.items():
        parent, depth = name.rpartition(".")[0], linear.in_features
        rows[parent, depth] = rows.get((parent, depth), 0) + linear.out_features
    for parent, depth in rows:
        # Experts are rounded together, by what they are called.
        kind = (parent.rstrip("0123456789"), depth)
        sums[kind] = sums.get(kind, 0) + 2 * depth**2
    widest = max((depth for _, depth in rows), default=0)
    inputs = num_tokens * sum(depth for _, depth in rows)
    largest = max((count * depth for (_, depth), count in rows.items()), default=0)
    copy = sum(one.numel() for one in layer.parameters())
    # Inputs are let go when they have been summed up.
    work = max(inputs + widest**2, _SQUARES * widest**2, _COPIES * largest)
    return copy + max(sums.values(), default=0) + work
