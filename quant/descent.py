"""Coordinate descent on rounded weights: codes and scales are decided one after the other, each
given all others.

GPTQ decides a column once, before it knows what becomes of the columns after it. Here the columns
go round again. With A the weights that would be best, Q [N, K] those that the codes stand for, and
H [K, K] the damped products of the inputs, the error is tr (A - Q) H (A - Q)^T, and its negative
half gradient is R = (A - Q) H. Given all others, column k is best at q_k + R[:, k] / H[k, k], whose
nearest number is its best code; the scale of a group with codes c is best at s + (R c) / (c H c).
No step makes the error of a row larger.

Descent on codes is QuantEase's (Behdin et al. 2023, arXiv 2309.01885); scales take part in turns.
"""

import torch

from trtc.quant.code_grid import CodeGrid

_BLOCK = 128
"""Columns whose effect on all others is computed at once; a multiple of every group."""


def descend(
    codes: torch.Tensor,
    scales: torch.Tensor,
    unit: torch.Tensor,
    residual: torch.Tensor,
    gram: torch.Tensor,
    grid: CodeGrid,
    sweeps: int,
) -> None:
    """Improve codes and scales in place.

    Args:
        codes: [N, K] i8, numbers of the grid.
        scales: [N, K / group_size] f32, as they are stored.
        unit: of the scales (quant/code_grid.py).
        residual: R [N, K] f32; overwritten.
        gram: H [K, K] f32, with a positive diagonal.
        sweeps: how often each scale and each code is decided.
    """
    depth = codes.shape[1]
    for _ in range(sweeps):
        for begin in range(0, depth, _BLOCK):
            columns = slice(begin, min(begin + _BLOCK, depth))
            block = _Block(codes, scales, residual, gram, columns)
            block.fit_scales(grid, unit)
            block.fit_codes(grid)
            residual.addmm_(block.finish(), gram[columns])


class _Block:
    """Columns of a weight whose groups are whole, transposed: a column is a contiguous row."""

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        residual: torch.Tensor,
        gram: torch.Tensor,
        columns: slice,
    ) -> None:
        self._group_size = codes.shape[1] // scales.shape[1]
        groups = slice(columns.start // self._group_size, columns.stop // self._group_size)
        self._codes, self._scales = codes[:, columns], scales[:, groups]
        self._gram = gram[columns, columns]
        self._residual = residual[:, columns].T.contiguous()
        self._numbers = self._codes.T.float().contiguous()
        self._steps = self._scales.T.contiguous()
        self._before = self._values()

    def fit_scales(self, grid: CodeGrid, unit: torch.Tensor) -> None:
        for group, scale in enumerate(self._steps):
            rows = slice(group * self._group_size, (group + 1) * self._group_size)
            numbers = self._numbers[rows]
            products = self._gram[:, rows] @ numbers
            curvature = (numbers * products[rows]).sum(0)
            slope = (numbers * self._residual[rows]).sum(0)
            best = torch.where(curvature > 0, scale + slope / curvature, scale)
            change = grid.round_scales(best, unit) - scale
            # A rounded scale may be worse than what is there, and none may become zero.
            gain = 2 * change * slope - change.square() * curvature
            change = torch.where((gain > 0) & (scale + change != 0), change, 0)
            scale += change
            self._residual -= products * change

    def fit_codes(self, grid: CodeGrid) -> None:
        for k, numbers in enumerate(self._numbers):
            scale = self._steps[k // self._group_size]
            best = grid.round(numbers + self._residual[k] / (self._gram[k, k] * scale))
            self._residual.addr_(self._gram[k], (numbers - best) * scale)
            numbers.copy_(best)

    def finish(self) -> torch.Tensor:
        """Store codes and scales; by how much less the columns [N, columns] are than before."""
        self._codes.copy_(self._numbers.T)
        self._scales.copy_(self._steps.T)
        return (self._before - self._values()).T

    def _values(self) -> torch.Tensor:
        groups = self._numbers.reshape(len(self._steps), self._group_size, -1)
        return (groups * self._steps[:, None]).reshape(self._numbers.shape)
