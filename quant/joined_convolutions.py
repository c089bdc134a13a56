"""Export of convolutions that Transformers joins: checkpoints have those of q, k and v apart."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_JOINED, _OF_PART = "conv1d", "proj"


@contextmanager
def split_convolutions(model: torch.nn.Module) -> Iterator[None]:
    """Within the block nvidia-modelopt exports convolutions by the checkpoint's names.

    It reverses Transformers' conversions of names and shapes, but takes every tensor of three
    dimensions for one of several experts, and then reverses none.
    """
    from modelopt.torch.export import quant_aware_conversion as conversion

    split = conversion._apply_split_rule

    def split_or_convolution(state: dict[str, torch.Tensor], rule: Any) -> None:
        if rule.fused_suffix.endswith(_JOINED):
            _split(model, state, rule.fused_suffix, rule.part_suffixes)
        else:
            split(state, rule)

    conversion._apply_split_rule = split_or_convolution
    try:
        yield
    finally:
        conversion._apply_split_rule = split


def _split(
    model: torch.nn.Module, state: dict[str, torch.Tensor], joined: str, parts: tuple[str, ...]
) -> None:
    """Of tensors [channels, 1, taps], what each projection gives."""
    end = f"{joined}.weight"
    for name in [one for one in state if one.endswith(end)]:
        start = name.removesuffix(end)
        sizes = [_width(model, start + one.replace(_JOINED, _OF_PART)) for one in parts]
        for part, tensor in zip(parts, torch.split(state.pop(name), sizes), strict=True):
            state[f"{start}{part}.weight"] = tensor.clone()


def _width(model: torch.nn.Module, linear: str) -> int:
    found = model.get_submodule(linear)
    assert isinstance(found, torch.nn.Linear), linear
    return found.out_features
