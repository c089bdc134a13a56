"""GPTQ and GPTAQ: weights rounded column by column, each error made good by the columns after it.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) rounds W [N, K] so that |(W - Q) X|^2 is small over
calibration inputs X [K, T]. Only H = X X^T [K, K] of them is needed. With U the upper Cholesky
factor of the damped H's inverse, column k is rounded, and its error e = (w_k - q_k) / U[k, k]
changes the columns after it by -e U[k, k+1:].

GPTAQ (Li et al. 2025, arXiv 2504.02692) aims at the outputs of the unquantised model: X is what the
linear gets in the model that is quantised so far, X~ what it gets in the unquantised one, and
|W X~ - Q X|^2 is to be small. With C = (X~ - X) X^T, column k changes those after it by
w_k P[k, k+1:] besides, P = triu(C U^T, 1) U.
"""

from dataclasses import dataclass
from typing import cast

import torch

from trtc.protos.errors import CalibrationError
from trtc.quant.code_grid import INT4, CodeGrid
from trtc.quant.scheme import Gptq

_BLOCK = 128
"""Columns whose effect on the columns after the block is computed at once."""
_MAX_DAMPING = 1.0
_SCALES_TRIED = 48


@dataclass(frozen=True)
class InputStatistics:
    """What rounding needs to know of the inputs X [K, T] of linears."""

    gram: torch.Tensor
    """X X^T [K, K] f32."""
    shift: torch.Tensor | None = None
    """(X~ - X) X^T [K, K] f32, X~ being the unquantised model's inputs; None: plain GPTQ."""


@dataclass(frozen=True)
class Rounded:
    """Weights as their format has them: scale * code."""

    codes: torch.Tensor
    """[N, K]: i8, in 4 bits numbers of their grid (quant/code_grid.py), or f8e4m3."""
    scales: torch.Tensor
    """[N, K / group_size], or [N, 1], f32 that bf16 has too; of 4 bits of either sign."""
    scale_unit: torch.Tensor | None = None
    """[] f32, of scales in 8 bits."""

    def values(self) -> torch.Tensor:
        """The weights [N, K] f32 that they stand for."""
        return _dequantized(self.codes, self.scales)

    def on_cpu(self) -> "Rounded":
        """The same in the CPU's memory."""
        unit = None if self.scale_unit is None else self.scale_unit.cpu()
        return Rounded(self.codes.cpu(), self.scales.cpu(), unit)


def search_scales(
    weight: torch.Tensor, group_size: int, grid: CodeGrid = INT4, *, by_row: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of each group of input channels [N, K / group_size], in f32 that bf16 has too, and
    the unit of the grid's scales: [], or [N, 1, 1] if each row has one.

    A group's largest weight has the sign of the grid's first number, which reaches furthest: its
    scale is negative where that weight is positive. Of scales that clip more or less, the one with
    the least squared error is taken.

    Args:
        weight: [N, K] f32; K is a multiple of `group_size`.
    """
    groups = weight.reshape(len(weight), -1, group_size)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    widest = largest / grid.numbers[0]
    unit = grid.scale_unit(widest, by_row=by_row)
    widest = torch.where(widest == 0, unit, widest)
    best = torch.full_like(widest, torch.inf)
    found = widest
    for share in torch.linspace(*grid.shares, _SCALES_TRIED).tolist():
        scale = grid.round_scales(widest * share, unit)
        error = (grid.round(groups / scale) * scale - groups).square_().sum(-1, keepdim=True)
        found = torch.where(error < best, scale, found)
        best = torch.minimum(error, best)
    return found.squeeze(-1), unit


def round_weights(
    weight: torch.Tensor,
    inputs: InputStatistics,
    group_size: int,
    settings: Gptq,
    grid: CodeGrid = INT4,
) -> Rounded:
    """Round a weight, or several that share their inputs as rows of one.

    Scales are found first, of the weights as they are, so that columns can be rounded in the order
    of their inputs' power while groups stay in the order of the channels.

    Args:
        weight: [N, K] f32, on the device of `inputs`.

    Raises:
        CalibrationError: inputs that are not finite.
    """
    gram, weight = inputs.gram, weight.clone()
    if not bool(gram.diagonal().isfinite().all()):
        raise CalibrationError("gets activations that are not finite")
    silent = gram.diagonal() == 0
    weight[:, silent] = 0
    scales, unit = search_scales(weight, group_size, grid)
    order = gram.diagonal().argsort(descending=True, stable=True)
    upper = _inverse_factor(gram[order[:, None], order], settings.damping)
    pull = None
    if inputs.shift is not None:
        pull = inputs.shift[order[:, None], order] @ upper.T
        pull = (pull.triu_(1) @ upper).mul_(settings.correction)
    of_column = scales[:, order // group_size]
    ordered = _round_columns(weight[:, order], of_column, upper, pull, grid)
    codes = torch.empty_like(ordered)
    codes[:, order] = ordered
    return Rounded(codes.to(torch.int8), scales, unit if grid.byte_scales else None)


def _inverse_factor(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """U [K, K], upper, of U^T U = inverse(gram + damping); more damping where it takes that.

    A wide linear's matrices are gigabytes: three are held at once.

    Args:
        gram: its diagonal is overwritten.
    """
    diagonal = gram.diagonal()
    diagonal.add_((diagonal == 0).to(gram.dtype))
    undamped, mean = diagonal.clone(), diagonal.mean()
    while damping <= _MAX_DAMPING:
        torch.add(undamped, damping * mean, out=diagonal)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if not failed:
            factor = torch.cholesky_inverse(factor)
            upper, failed = torch.linalg.cholesky_ex(factor, upper=True)
            if not failed:
                return cast(torch.Tensor, upper)
        damping *= 10
    raise CalibrationError("gets activations whose products cannot be inverted")


def _round_columns(
    weight: torch.Tensor,
    scales: torch.Tensor,
    upper: torch.Tensor,
    pull: torch.Tensor | None,
    grid: CodeGrid,
) -> torch.Tensor:
    """Codes [N, K] of a weight whose columns are in the order of rounding.

    Args:
        weight: [N, K]; overwritten.
        scales: [N, K], of every weight.
        pull: P of GPTAQ.
    """
    codes = torch.empty_like(weight)
    errors = torch.empty_like(weight[:, :_BLOCK])
    for begin in range(0, weight.shape[1], _BLOCK):
        end = min(begin + _BLOCK, weight.shape[1])
        block = weight[:, begin:end]
        for k in range(begin, end):
            at, rest = k - begin, slice(k - begin + 1, end - begin)
            column = block[:, at]
            codes[:, k] = grid.round(column / scales[:, k])
            error = (column - codes[:, k] * scales[:, k]) / upper[k, k]
            errors[:, at] = error
            block[:, rest].addr_(error, upper[k, k + 1 : end], alpha=-1)
            if pull is not None:
                block[:, rest].addr_(column, pull[k, k + 1 : end])
        weight[:, end:] -= errors[:, : end - begin] @ upper[begin:end, end:]
        if pull is not None:
            weight[:, end:] += block @ pull[begin:end, end:]
    return codes


def _dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    groups = codes.reshape(*scales.shape, -1).float() * scales[..., None]
    return groups.reshape(codes.shape)
