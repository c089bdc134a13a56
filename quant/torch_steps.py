"""The steps of quant/block_steps.py in PyTorch, column after column: what they mean."""

from dataclasses import dataclass

import torch

from trtc.quant.code_grid import CodeGrid

_SEARCHED_AT_ONCE = 1 << 25
"""Weights whose scales are searched for at once: the search takes some times their memory."""


@dataclass(frozen=True)
class TorchSteps:
    """See BlockSteps."""

    grid: CodeGrid

    def best_scales(
        self, groups: torch.Tensor, widest: torch.Tensor, unit: torch.Tensor
    ) -> torch.Tensor:
        rows = max(1, _SEARCHED_AT_ONCE // groups[0].numel())
        parts = (torch.split(one, rows) for one in (groups, widest, unit.expand(len(groups), 1, 1)))
        return torch.cat([self._best_scales(*some) for some in zip(*parts, strict=True)])

    def _best_scales(
        self, groups: torch.Tensor, widest: torch.Tensor, unit: torch.Tensor
    ) -> torch.Tensor:
        best = torch.full_like(widest, torch.inf)
        found = widest
        for share in self.grid.tried_shares.tolist():
            scale = self.grid.round_scales(widest * share, unit)
            rounded = self.grid.round(groups / scale) * scale
            error = (rounded - groups).square_().sum(-1, keepdim=True)
            found = torch.where(error < best, scale, found)
            best = torch.minimum(error, best)
        return found

    def round_block(
        self, block: torch.Tensor, scales: torch.Tensor, upper: torch.Tensor, codes: torch.Tensor
    ) -> None:
        # A column of the weight is a row here, which is contiguous.
        columns = block.T.contiguous()
        rounded = torch.empty_like(columns)
        for k, (column, scale) in enumerate(zip(columns, scales, strict=True)):
            rounded[k] = self.grid.round(column / scale)
            column.sub_(rounded[k] * scale).div_(upper[k, k])
            columns[k + 1 :].addr_(upper[k, k + 1 :], column, alpha=-1)
        codes.copy_(rounded.T)
        block.copy_(columns.T)

    def descend_block(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        residual: torch.Tensor,
        gram: torch.Tensor,
        unit: torch.Tensor,
        *,
        fit_scales: bool,
    ) -> torch.Tensor:
        block = _Block(self.grid, codes, scales, residual, gram, unit)
        if fit_scales:
            block.fit_scales()
        block.fit_codes()
        return block.finish()


class _Block:
    """Columns of a weight whose groups are whole, transposed: a column is a contiguous row."""

    def __init__(
        self,
        grid: CodeGrid,
        codes: torch.Tensor,
        scales: torch.Tensor,
        residual: torch.Tensor,
        gram: torch.Tensor,
        unit: torch.Tensor,
    ) -> None:
        self._grid, self._unit, self._gram = grid, unit, gram
        self._group_size = codes.shape[1] // scales.shape[1]
        self._codes, self._scales = codes, scales
        # A copy, also where the transpose is contiguous: of one row.
        self._residual = residual.T.clone(memory_format=torch.contiguous_format)
        self._numbers = codes.T.float().contiguous()
        self._steps = scales.T.clone(memory_format=torch.contiguous_format)
        self._before = self._values()

    def fit_scales(self) -> None:
        for group, scale in enumerate(self._steps):
            rows = slice(group * self._group_size, (group + 1) * self._group_size)
            numbers = self._numbers[rows]
            products = self._gram[:, rows] @ numbers
            curvature = (numbers * products[rows]).sum(0)
            slope = (numbers * self._residual[rows]).sum(0)
            best = torch.where(curvature > 0, scale + slope / curvature, scale)
            change = self._grid.round_scales(best, self._unit) - scale
            # A rounded scale may be worse than what is there, and none may become zero.
            gain = 2 * change * slope - change.square() * curvature
            change = torch.where((gain > 0) & (scale + change != 0), change, 0)
            scale += change
            self._residual -= products * change

    def fit_codes(self) -> None:
        for k, numbers in enumerate(self._numbers):
            scale = self._steps[k // self._group_size]
            best = self._grid.round(numbers + self._residual[k] / (self._gram[k, k] * scale))
            self._residual.addr_(self._gram[k], (numbers - best) * scale)
            numbers.copy_(best)

    def finish(self) -> torch.Tensor:
        """Store codes and scales; by how much less the columns [N, C] are than before."""
        self._codes.copy_(self._numbers.T)
        self._scales.copy_(self._steps.T)
        return (self._before - self._values()).T

    def _values(self) -> torch.Tensor:
        groups = self._numbers.reshape(len(self._steps), self._group_size, -1)
        return (groups * self._steps[:, None]).reshape(self._numbers.shape)
