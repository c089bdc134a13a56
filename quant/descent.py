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

from trtc.quant.block_steps import BLOCK
from trtc.quant.code_grid import CodeGrid
from trtc.quant.device_steps import steps_on
from trtc.quant.triangles import panels


def descend(
    codes: torch.Tensor,
    scales: torch.Tensor,
    unit: torch.Tensor,
    change: torch.Tensor,
    drift: torch.Tensor | None,
    gram: torch.Tensor,
    grid: CodeGrid,
    sweeps: int,
    *,
    fit_scales: bool,
) -> None:
    """Improve codes and scales in place.

    R = (W - Q) H + D is computed for a panel of columns when its turn comes; within it, each block
    changes what is left of it.

    Args:
        codes: [N, K], numbers of the grid.
        scales: [N, K / group_size] f32, as they are stored.
        unit: of the scales (quant/code_grid.py).
        change: W - Q [N, K] f32 of any weights W; kept up with Q.
        drift: D = (A - W) H [N, K] f32; None: A is W.
        gram: H [K, K] f32, with a positive diagonal.
        sweeps: how often each scale and each code is decided.
        fit_scales: whether scales are decided; else there is one a row.
    """
    for _ in range(sweeps):
        for panel in panels(codes.shape[1]):
            gradient = change @ gram[:, panel]
            if drift is not None:
                gradient += drift[:, panel]
            _decide(panel, codes, scales, unit, change, gradient, gram, grid, fit_scales=fit_scales)


def _decide(
    panel: slice,
    codes: torch.Tensor,
    scales: torch.Tensor,
    unit: torch.Tensor,
    change: torch.Tensor,
    gradient: torch.Tensor,
    gram: torch.Tensor,
    grid: CodeGrid,
    *,
    fit_scales: bool,
) -> None:
    """The columns of a panel, whose R [N, columns] is `gradient`; overwritten."""
    steps = steps_on(codes.device, grid)
    group_size = codes.shape[1] // scales.shape[1]
    for begin in range(panel.start, panel.stop, BLOCK):
        block = slice(begin, min(begin + BLOCK, panel.stop))
        rest = slice(block.stop, panel.stop)
        groups = slice(block.start // group_size, block.stop // group_size)
        less = steps.descend_block(
            codes[:, block],
            scales[:, groups] if fit_scales else scales,
            gradient[:, block.start - panel.start : block.stop - panel.start],
            gram[block, block],
            unit,
            fit_scales=fit_scales,
        )
        change[:, block] += less
        gradient[:, rest.start - panel.start :].addmm_(less, gram[block, rest])
