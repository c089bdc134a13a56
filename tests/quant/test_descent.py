"""Coordinate descent against the error that it promises to make smaller, in float64."""

import pytest
import torch

from trtc.quant.code_grid import E4M3, INT4, IQ4, CodeGrid
from trtc.quant.descent import descend
from trtc.quant.gptq import search_scales

ROWS = 12
CASES = pytest.mark.parametrize(
    ("grid", "depth", "group"),
    [(INT4, 256, 128), (INT4, 96, 32), (IQ4, 160, 32), (IQ4, 144, 16), (E4M3, 136, 136)],
)


class Problem:
    """Weights [ROWS, depth] rounded to nearest, and the quadratic form of inputs whose channels are
    far from independent."""

    def __init__(self, grid: CodeGrid, depth: int, group: int) -> None:
        torch.manual_seed(depth)
        self.grid, self.group = grid, group
        x = torch.randn(512, depth // 4) @ torch.randn(depth // 4, depth)
        x += 0.3 * torch.randn(512, depth)
        self.gram = x.T @ x / 512
        self.weight = torch.randn(ROWS, depth)
        self.aim = self.weight + 0.05 * torch.randn(ROWS, depth)
        self.scales, self.unit = search_scales(self.weight, group, grid)
        spread = self.scales.repeat_interleave(group, 1)
        self.codes = grid.round(self.weight / spread).to(grid.code_dtype)

    def descend(self, sweeps: int) -> None:
        change = self.weight - self.values()
        drift = (self.aim - self.weight) @ self.gram
        given = (self.unit, change, drift, self.gram, self.grid)
        kept = self.scales.clone()
        descend(self.codes, self.scales, *given, sweeps, fit_scales=self.fits_scales)
        assert self.fits_scales or torch.equal(self.scales, kept)
        assert torch.allclose(change, self.weight - self.values(), atol=1e-5)

    @property
    def fits_scales(self) -> bool:
        """Of rows they are given."""
        return self.group < self.weight.shape[1]

    def values(self) -> torch.Tensor:
        return self.codes * self.scales.repeat_interleave(self.group, 1)

    def errors(self, values: torch.Tensor) -> torch.Tensor:
        """Of each row of [..., ROWS, depth]."""
        off = (self.aim - values).double()
        return (off @ self.gram.double() * off).sum(-1)


@CASES
def test_every_sweep_makes_the_error_of_every_row_smaller(
    grid: CodeGrid, depth: int, group: int
) -> None:
    problem = Problem(grid, depth, group)
    first = before = problem.errors(problem.values())
    for _ in range(4):
        problem.descend(1)
        after = problem.errors(problem.values())
        assert bool((after <= before * (1 + 1e-5)).all())
        before = after
    assert bool((before < 0.6 * first).all())
    unit = problem.unit
    assert torch.equal(grid.round_scales(problem.scales, unit), problem.scales)
    assert bool((problem.scales != 0).all()) and set(problem.codes.unique().tolist()) <= {
        *grid.numbers
    }


@CASES
def test_no_other_code_is_better_where_descent_ends(grid: CodeGrid, depth: int, group: int) -> None:
    problem = Problem(grid, depth, group)
    problem.descend(60)
    values, spread = problem.values(), problem.scales.repeat_interleave(group, 1)
    least = problem.errors(values)
    numbers = torch.tensor(grid.numbers)[:, None]
    for k in range(depth):
        others = values.repeat(len(numbers), 1, 1)
        others[:, :, k] = numbers * spread[:, k]
        assert bool((problem.errors(others) >= least * (1 - 1e-4)).all()), k


def test_no_other_scale_is_better_where_descent_ends() -> None:
    problem = Problem(INT4, 96, 32)
    problem.descend(60)
    least = problem.errors(problem.values())
    for share in (0.98, 0.99, 1.01, 1.02):
        for group in range(3):
            scales = problem.scales.clone()
            scales[:, group] = (scales[:, group] * share).bfloat16().float()
            other = problem.codes * scales.repeat_interleave(32, 1)
            assert bool((problem.errors(other) >= least * (1 - 1e-4)).all()), (share, group)


@CASES
def test_a_sweep_decides_as_the_definition_says(grid: CodeGrid, depth: int, group: int) -> None:
    """In float64, with the gradient computed anew for every scale and every code."""
    problem = Problem(grid, depth, group)
    aim, gram, unit = problem.aim.double(), problem.gram.double(), problem.unit
    codes, scales = problem.codes.double(), problem.scales.double()

    def slope() -> torch.Tensor:
        return (aim - codes * scales.repeat_interleave(group, 1)) @ gram

    for begin in range(0, depth, 128):
        block = range(begin, min(begin + 128, depth))
        for start in block[::group] if problem.fits_scales else ():
            here = slice(start, start + group)
            own, scale = codes[:, here], scales[:, start // group]
            curvature = (own @ gram[here, here] * own).sum(1)
            best = scale + (own * slope()[:, here]).sum(1) / curvature
            rounded = grid.round_scales(best.float(), unit).double()
            is_nearer = (rounded - best).abs() < (scale - best).abs()
            scales[:, start // group] = torch.where(is_nearer, rounded, scale)
        for k in block:
            best = codes[:, k] + slope()[:, k] / gram[k, k] / scales[:, k // group]
            codes[:, k] = grid.round(best.float())
    problem.descend(1)
    assert (problem.codes == codes).double().mean() > 0.99  # f32 may tip a tie, and what follows it
    assert (problem.scales == scales).double().mean() > 0.99
