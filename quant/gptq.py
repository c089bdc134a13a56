"""GPTQ and GPTAQ: weights rounded column by column, each error made good by the columns after it,
then made better by coordinate descent (quant/descent.py).

GPTQ (Frantar et al. 2022, arXiv 2210.17323) rounds W [N, K] so that |(W - Q) X|^2 is small over
calibration inputs X [K, T]. Only H = X X^T [K, K] of them is needed. With U the upper Cholesky
factor of the damped H's inverse, column k is rounded, and its error e = (w_k - q_k) / U[k, k]
changes the columns after it by -e U[k, k+1:].

GPTAQ (Li et al. 2025, arXiv 2504.02692) aims at the outputs of the unquantised model: X is what the
linear gets in the model that is quantised so far, X~ what it gets in the unquantised one, and
|W X~ - Q X|^2 is to be small. With C = (X~ - X) X^T, the real weights that make it smallest are
W + W C H^-1. Those are rounded as GPTQ rounds; the paper changes columns one at a time, as if those
before could not make good for their own inputs, which is less accurate (docs/lab/accuracy-4bit.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trtc.protos.errors import CalibrationError
from trtc.quant.block_steps import BLOCK
from trtc.quant.code_grid import INT4, CodeGrid
from trtc.quant.descent import descend
from trtc.quant.device_steps import steps_on
from trtc.quant.pinned import on_cpu
from trtc.quant.scheme import Gptq
from trtc.quant.triangles import invert_lower, multiply_by_transposed

_MAX_DAMPING = 1.0
_PERMUTED_AT_ONCE = 128
"""Rows of a matrix."""
VALUES_AT_ONCE = 1 << 27
"""Weights whose values are made of codes at once."""


@dataclass(frozen=True)
class InputStatistics:
    """What rounding needs to know of the inputs X [K, T] of linears."""

    gram: torch.Tensor
    """X X^T [K, K] f32."""
    shift: torch.Tensor | None = None
    """(X~ - X) X^T [K, K] f32, X~ being the unquantised model's inputs; None: plain GPTQ."""

    def copy(self) -> "InputStatistics":
        shift = None if self.shift is None else self.shift.clone()
        return InputStatistics(self.gram.clone(), shift)


@dataclass(frozen=True)
class Rounded:
    """Weights as their format has them: scale * code."""

    codes: torch.Tensor
    """[N, K]: i8, in 4 and 6 bits numbers of their grid (quant/code_grid.py), or f8e4m3."""
    scales: torch.Tensor
    """[N, K / group_size], or [N, 1], f32 that bf16 has too; of 4 bits of either sign."""
    scale_unit: torch.Tensor | None = None
    """[] f32, of scales in 8 bits."""

    def values(self) -> torch.Tensor:
        """The weights [N, K] f32 that they stand for."""
        return _dequantized(self.codes, self.scales)

    def rows(self, which: slice | torch.Tensor) -> "Rounded":
        """Those of some output channels, or tokens."""
        return Rounded(self.codes[which], self.scales[which], self.scale_unit)

    def parts(self) -> Iterator[tuple[slice, "Rounded"]]:
        """All rows, some at a time: of a large one, values are gigabytes."""
        step = max(1, VALUES_AT_ONCE // self.codes.shape[1])
        for begin in range(0, len(self.codes), step):
            rows = slice(begin, begin + step)
            yield rows, self.rows(rows)

    def to(self, device: torch.device | str) -> "Rounded":
        """The same on a device."""
        unit = None if self.scale_unit is None else self.scale_unit.to(device)
        return Rounded(self.codes.to(device), self.scales.to(device), unit)

    def on_cpu(self) -> "Rounded":
        """The same in the CPU's memory, which is for what does not stay there (quant/pinned.py)."""
        unit = None if self.scale_unit is None else on_cpu(self.scale_unit)
        return Rounded(on_cpu(self.codes), on_cpu(self.scales), unit)


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
    steps = steps_on(weight.device, grid)
    return steps.best_scales(groups, widest, unit).squeeze(-1), unit


@torch.inference_mode()
def round_weights(
    weight: torch.Tensor,
    inputs: InputStatistics,
    group_size: int,
    settings: Gptq,
    grid: CodeGrid = INT4,
) -> Rounded:
    """Round a weight, or several that share their inputs as rows of one.

    Scales are found first, of the weights as they are, so that columns can be rounded in the order
    of their inputs' power while groups stay in the order of the channels. Descent finds them anew.

    Args:
        weight: [N, K] f32, on the device of `inputs`; overwritten.
        inputs: its matrices are overwritten.

    Raises:
        CalibrationError: inputs that are not finite.
    """
    weight.masked_fill_(inputs.gram.diagonal() == 0, 0)
    scales, unit = search_scales(weight, group_size, grid)
    codes = _round_by(weight, inputs, scales, unit, settings, grid, fit_scales=True)
    return Rounded(codes, scales, unit if grid.byte_scales else None)


@torch.inference_mode()
def round_by_scales(
    weight: torch.Tensor,
    inputs: InputStatistics,
    scales: torch.Tensor,
    settings: Gptq,
    grid: CodeGrid,
) -> torch.Tensor:
    """Codes [N, K] of a weight whose rows have the scales that they are given.

    Channels without any input are rounded to nearest.

    Args:
        weight: [N, K] f32, on the device of `inputs`; overwritten.
        inputs: its matrices are overwritten.
        scales: [N, 1] f32.

    Raises:
        CalibrationError: inputs that are not finite.
    """
    unit = torch.ones_like(scales[0, 0])
    return _round_by(weight, inputs, scales, unit, settings, grid, fit_scales=False)


def _round_by(
    weight: torch.Tensor,
    inputs: InputStatistics,
    scales: torch.Tensor,
    unit: torch.Tensor,
    settings: Gptq,
    grid: CodeGrid,
    *,
    fit_scales: bool,
) -> torch.Tensor:
    """Codes [N, K] of a weight, which is overwritten, as are the matrices of `inputs`.

    Args:
        scales: [N, K / group_size]; overwritten by better ones if they are fitted, else there is
            one a row.
        unit: of the scales.
    """
    power, group_size = inputs.gram.diagonal().clone(), weight.shape[1] // scales.shape[1]
    if not bool(power.isfinite().all()):
        raise CalibrationError("gets activations that are not finite")
    silent = power == 0
    order = power.argsort(descending=True, stable=True)
    if inputs.shift is None:
        drift, gram = None, inputs.gram.clone()
    else:
        drift = torch.matmul(weight, inputs.shift).mul_(settings.correction)
        # What is no longer needed holds the copy: these matrices are gigabytes.
        gram = inputs.shift.copy_(inputs.gram)
    upper = _inverse_factor(inputs.gram, order, settings.damping)
    product = None if drift is None else drift[:, order]
    if product is not None:
        multiply_by_transposed(product, upper)
    of_columns = scales.T.index_select(0, order // group_size)
    found = _round_columns(weight[:, order], product, of_columns, upper, grid)
    del product, of_columns, upper
    codes = torch.empty_like(found)
    codes[:, order] = found
    own = settings.shrinkage * power + settings.descent_damping * power.mean() + silent
    gram.diagonal().add_(own)
    change = weight.sub_(_dequantized(codes, scales))
    descend(codes, scales, unit, change, drift, gram, grid, settings.sweeps, fit_scales=fit_scales)
    return codes


def _inverse_factor(gram: torch.Tensor, order: torch.Tensor, damping: float) -> torch.Tensor:
    """U [K, K], upper, of U^T U = inverse(G + damping), where G is `gram` with its channels in
    `order`; more damping where it takes that.

    With J the matrix that reverses the order, L L^T = J (G + damping) J gives U = J inverse(L) J.
    A wide linear's matrices are gigabytes: beside `gram`, which becomes U, one is held at once.

    Args:
        gram: overwritten.
    """
    diagonal = gram.diagonal()
    diagonal.add_((diagonal == 0).to(gram.dtype))
    mean, reverse = diagonal.mean(), order.flip(0)
    while damping <= _MAX_DAMPING:
        # Symmetric: in memory column by column, which spares the solver a copy.
        factor = _permuted(gram, reverse, torch.empty_like(gram)).mT
        factor.diagonal().add_(damping * mean)
        failed = torch.zeros((), dtype=torch.int32, device=gram.device)
        torch.linalg.cholesky_ex(factor, out=(factor, failed))
        if not failed:
            invert_lower(factor)
            backwards = torch.arange(len(gram) - 1, -1, -1, device=gram.device)
            return _permuted(factor.mT, backwards, gram).mT
        damping *= 10
    raise CalibrationError("gets activations whose products cannot be inverted")


def _permuted(matrix: torch.Tensor, order: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`matrix` [K, K] with its rows and columns in `order`, in `result`.

    A block of rows at a time: indexing both at once would take an index of 8 bytes an element.
    """
    for rows, some in zip(
        *(torch.split(one, _PERMUTED_AT_ONCE) for one in (result, order)), strict=True
    ):
        torch.index_select(matrix[some], 1, order, out=rows)
    return result


def _round_columns(
    weight: torch.Tensor,
    product: torch.Tensor | None,
    scales: torch.Tensor,
    upper: torch.Tensor,
    grid: CodeGrid,
) -> torch.Tensor:
    """Codes [N, K] of a weight whose columns are in the order of rounding.

    What is rounded is W + P U, and column k is rounded when the errors E of those before have
    changed it by -E U: so a block takes (P - E) U of those before it at once.

    Args:
        weight: W [N, K]; overwritten.
        product: P [N, K]; None: zero.
        scales: [K, N], of the columns.
        upper: U [K, K].
    """
    codes = torch.empty_like(weight, dtype=grid.code_dtype)
    steps, depth = steps_on(weight.device, grid), weight.shape[1]
    for begin in range(0, depth, BLOCK):
        columns = slice(begin, min(begin + BLOCK, depth))
        rest = slice(columns.stop, depth)
        block = weight[:, columns]
        if product is not None:
            block.addmm_(product[:, columns], upper[columns, columns])
        steps.round_block(block, scales[columns], upper[columns, columns], codes[:, columns])
        # The block holds its errors.
        change = block.neg() if product is None else product[:, columns] - block
        weight[:, rest].addmm_(change, upper[columns, rest])
    return codes


def _dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    groups = codes.reshape(*scales.shape, -1).float() * scales[..., None]
    return groups.reshape(codes.shape)
