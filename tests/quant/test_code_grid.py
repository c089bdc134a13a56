"""Grids of codes: the nearest number of a value, against a search through all of them."""

import math
from itertools import pairwise

import pytest
import torch

from trtc.quant.code_grid import E4M3, GRIDS, IQ4, CodeGrid

ALL = {**GRIDS, "f8e4m3": E4M3}


@pytest.mark.parametrize("grid", ALL.values(), ids=ALL)
def test_rounding_finds_the_nearest_number(grid: CodeGrid) -> None:
    values = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * grid.numbers[-1]
    found = grid.round(values)
    assert found.shape == values.shape and found.dtype == torch.float32
    for value, number in zip(values.flatten().tolist(), found.flatten().tolist(), strict=True):
        assert number == min(grid.numbers, key=lambda one: abs(one - value))


def test_numbers_of_e4m3_are_those_of_the_type() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert set(E4M3.numbers) == set(codes[codes.isfinite()].tolist())
    assert E4M3.numbers == tuple(sorted(E4M3.numbers)), "each once, in order"
    ends = torch.tensor([-math.inf, -1e30, 1e30, math.inf, math.nan])
    assert E4M3.round(ends).tolist() == [-448, -448, 448, 448, 448]


def test_the_lower_number_is_taken_halfway_and_all_values_have_one() -> None:
    numbers = IQ4.numbers
    halfway = [(low + high) / 2 for low, high in pairwise(numbers)]
    assert IQ4.round(torch.tensor(halfway)).tolist() == list(numbers[:-1])
    above = [math.nextafter(one, math.inf) + 1e-5 for one in halfway]
    assert IQ4.round(torch.tensor(above)).tolist() == list(numbers[1:])
    ends = torch.tensor([-math.inf, -1e30, 1e30, math.inf, math.nan])
    assert IQ4.round(ends).tolist() == [*[numbers[0]] * 2, *[numbers[-1]] * 3]
