"""Blocks of weights to round, and how good their codes are."""

from dataclasses import dataclass

import torch

from trtc.quant.block_steps import BlockSteps
from trtc.quant.code_grid import E4M3, INT4, INT6, IQ4, CodeGrid
from trtc.quant.gptq import search_scales


@dataclass(frozen=True)
class Case:
    """A block of columns, the right half of a larger weight."""

    grid: CodeGrid
    group_size: int
    rows: int
    columns: int
    fit_scales: bool = True
    """Whether descent decides them; else there is one a row, for all groups."""


CASES = {
    "int4": Case(INT4, 128, 10, 128),
    "int4-g32-ragged": Case(INT4, 32, 4, 96),
    "iq4": Case(IQ4, 32, 3, 128),
    "iq4-g16-ragged": Case(IQ4, 16, 5, 48),
    "int6-g64-one-row": Case(INT6, 64, 1, 64),
    "e4m3-ragged": Case(E4M3, 96, 9, 96, fit_scales=False),
}


def correlated(tokens: int, depth: int, seed: int) -> torch.Tensor:
    """Inputs [tokens, depth] whose channels are far from independent; one is always zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, depth // 4, generator=generator)
    x = x @ torch.randn(depth // 4, depth, generator=generator)
    x += 0.3 * torch.randn(tokens, depth, generator=generator)
    x[:, depth - 3] = 0
    return x


def weights(rows: int, depth: int, seed: int) -> torch.Tensor:
    """[rows, depth]; of several rows, the second is zero."""
    weight = torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed))
    weight[1:2] = 0
    return weight


@dataclass(frozen=True)
class Problem:
    """A case's weight and what it is rounded by, on one device."""

    case: Case
    weight: torch.Tensor
    gram: torch.Tensor
    scales: torch.Tensor
    unit: torch.Tensor

    @property
    def block(self) -> slice:
        """Its columns."""
        return slice(self.case.columns, None)

    def values(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """What they stand for."""
        return codes * scales.repeat_interleave(self.case.group_size, 1)

    def nearest(self) -> torch.Tensor:
        """Codes, of the weight as it is."""
        steps = self.scales.repeat_interleave(self.case.group_size, 1)
        return self.case.grid.round(self.weight / steps).to(self.case.grid.code_dtype)

    def error(self, codes: torch.Tensor, scales: torch.Tensor) -> float:
        """In float64."""
        off = (self.weight - self.values(codes, scales)).double()
        return float((off @ self.gram.double() * off).sum())


@dataclass(frozen=True)
class Outcome:
    """What a step made of the block; all columns of the weight."""

    codes: torch.Tensor
    scales: torch.Tensor
    rest: torch.Tensor
    """Of the block: its errors, or its change."""

    def cpu(self) -> "Outcome":
        return Outcome(self.codes.cpu(), self.scales.cpu(), self.rest.cpu())


def problem(case: Case, device: str = "cpu") -> Problem:
    """The same on every device."""
    depth = 2 * case.columns
    x, weight = correlated(512, depth, case.rows), weights(case.rows, depth, case.rows)
    gram = (x.T @ x).div_(512)
    gram.diagonal().add_(0.05 * gram.diagonal().mean())
    scales, unit = search_scales(weight, case.group_size, case.grid)
    if not case.fit_scales:
        scales = scales.amax(1, keepdim=True).expand_as(scales).contiguous()
    operands = (weight, gram, scales, unit)
    return Problem(case, *(one.to(device) for one in operands))


def rounded(steps: BlockSteps, given: Problem) -> Outcome:
    """A block by GPTQ, beside columns that stay as they are."""
    case, block = given.case, given.block
    upper = torch.linalg.cholesky(torch.linalg.inv(given.gram), upper=True)
    weight, codes = given.weight.clone(), given.nearest()
    steps.round_block(
        weight[:, block],
        given.scales.T.repeat_interleave(case.group_size, 0)[block].contiguous(),
        upper[block, block],
        codes[:, block],
    )
    rest = slice(None, case.columns)
    assert torch.equal(weight[:, rest], given.weight[:, rest])
    assert torch.equal(codes[:, rest], given.nearest()[:, rest])
    return Outcome(codes, given.scales, weight[:, block])


def descended(steps: BlockSteps, given: Problem) -> Outcome:
    """A block that is rounded to nearest, by a turn of descent."""
    block, codes, scales = given.block, given.nearest(), given.scales.clone()
    residual = (given.weight - given.values(codes, scales)) @ given.gram
    kept = residual.clone()
    change = steps.descend_block(
        codes[:, block],
        scales[:, given.case.columns // given.case.group_size :],
        residual[:, block],
        given.gram[block, block],
        given.unit,
        fit_scales=given.case.fit_scales,
    )
    assert torch.equal(residual, kept)
    return Outcome(codes, scales, change)
