"""The steps of rounding that take columns one after the other, for a few columns at a time."""

from typing import Protocol

import torch

BLOCK = 128
"""Columns that a step takes, at most: all of its operands are made of them. Every group divides
it."""


class BlockSteps(Protocol):
    """What they compute for the numbers and scales of one grid. Rows do not depend on each other;
    tensors may be parts of larger ones, whose rows are contiguous."""

    def best_scales(
        self, groups: torch.Tensor, widest: torch.Tensor, unit: torch.Tensor
    ) -> torch.Tensor:
        """Scales [N, G, 1] f32 with the least squared error among those that clip more or less.

        Args:
            groups: weights [N, G, group_size] f32.
            widest: [N, G, 1] f32, scales that do not clip.
            unit: of scales, f32; [N, 1, 1] or [].
        """
        ...

    def round_block(
        self, block: torch.Tensor, scales: torch.Tensor, upper: torch.Tensor, codes: torch.Tensor
    ) -> None:
        """Round columns by GPTQ (quant/gptq.py).

        Args:
            block: weights [N, C] f32, which become the columns' errors.
            scales: [C, N] f32, contiguous.
            upper: [C, C] f32, of any layout.
            codes: [N, C], of the grid's code_dtype, written.
        """
        ...

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
        """Decide scales and codes of whole groups once more (quant/descent.py).

        Args:
            codes: [N, C], of the grid's code_dtype, overwritten.
            scales: [N, C / group_size] f32, overwritten.
            residual: [N, C] f32; left as it is.
            gram: [C, C] f32.
            unit: of scales, [] f32.
            fit_scales: whether scales are decided, too.

        Returns:
            By how much less the weights are than before, [N, C] f32.
        """
        ...
