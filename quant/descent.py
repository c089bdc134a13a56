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
    steps, depth = steps_on(codes.device, grid), codes.shape[1]
    group_size = depth // scales.shape[1]
    for _ in range(sweeps):
        for begin in range(0, depth, BLOCK):
            columns = slice(begin, min(begin + BLOCK, depth))
            groups = slice(begin // group_size, columns.stop // group_size)
            change = steps.descend_block(
                codes[:, columns],
                scales[:, groups],
                residual[:, columns],
                gram[columns, columns],
                unit,
            )
            residual.addmm_(change, gram[columns])
