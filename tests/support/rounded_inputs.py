"""Logits of a Transformers model whose linears round their inputs by row, without trtc's code."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from numpy.typing import NDArray

from tests.support.models import transformers_model

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def rounded_logits(
    path: Path,
    ids: Sequence[int],
    code: torch.dtype,
    group: int | None,
    block: int = 0,
    kept: str = "",
) -> NDArray[np.float32]:
    """Logits [len(ids), vocab] of one sequence, in f32.

    Args:
        code: what inputs of the linears in decoder layers are rounded to.
        group: channels that share a scale; None: a row does.
        block: channels that are rotated together while they are rounded; 0: none.
        kept: end of the names of linears whose inputs are not rounded.
    """
    model = transformers_model(path, "float32")
    for name, module in model.named_modules():
        is_kept = bool(kept) and name.endswith(kept)
        if isinstance(module, torch.nn.Linear) and ".layers." in name and not is_kept:
            module.register_forward_pre_hook(_rounding(code, group, block))
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0]
    result: NDArray[np.float32] = logits.float().numpy()
    return result


def rotated(x: torch.Tensor, block: int) -> torch.Tensor:
    """Blocks of the last axis times a Hadamard matrix over its root, by compressed-tensors."""
    if not block:
        return x
    matrix = deterministic_hadamard_matrix(block, x.dtype) / block**0.5
    return (x.reshape(-1, block) @ matrix).reshape(x.shape)


def _rounding(code: torch.dtype, group: int | None, block: int) -> Callable[..., Any]:
    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        x = rotated(inputs[0], block)
        parts = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
        scales = parts.abs().amax(-1, keepdim=True).clamp(min=1e-10) / _LARGEST[code]
        values = parts / scales
        codes = values.round() if code == torch.int8 else values.to(code).float()
        return (rotated((codes * scales).reshape(x.shape), block),)

    return hook
