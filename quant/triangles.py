"""Products with matrices of which one half is zero, or follows from the other: by panels of rows or
columns, they take about half of the operations of whole ones."""

from collections.abc import Iterator

import torch

_PANEL = 1024
"""Wide enough for a matrix product to be as fast as any."""


def panels(depth: int) -> Iterator[slice]:
    """Of rows or columns, in order."""
    for begin in range(0, depth, _PANEL):
        yield slice(begin, min(begin + _PANEL, depth))


def add_lower_gram(total: torch.Tensor, x: torch.Tensor) -> None:
    """Add x^T x of x [T, K] to `total` [K, K], of which what is above the diagonal's panels does
    not count."""
    for rows in panels(len(total)):
        total[rows, : rows.stop].addmm_(x[:, rows].T, x[:, : rows.stop])


def complete_gram(total: torch.Tensor) -> None:
    """Fill in what `add_lower_gram` left out."""
    for columns in panels(len(total)):
        total[: columns.start, columns] = total[columns, : columns.start].T


def invert_lower(matrix: torch.Tensor) -> None:
    """Replace a lower triangular matrix [K, K] by its inverse."""
    for rows in panels(len(matrix)):
        own, before = matrix[rows, rows], matrix[rows, : rows.start]
        identity = torch.eye(len(own), dtype=own.dtype, device=own.device)
        inverse = torch.linalg.solve_triangular(own, identity, upper=False)
        # The rows before are inverted.
        before.copy_(inverse @ (before @ matrix[: rows.start, : rows.start])).neg_()
        own.copy_(inverse)


def multiply_by_transposed(left: torch.Tensor, upper: torch.Tensor) -> None:
    """Replace `left` [N, K] by left @ upper^T; `upper` [K, K] is upper triangular."""
    for columns in panels(len(upper)):
        rest = slice(columns.start, None)
        left[:, columns] = left[:, rest] @ upper[columns, rest].T
