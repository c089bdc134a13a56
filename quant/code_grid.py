"""The numbers that codes stand for, and the scales that their groups may have."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from trtc.plugins.iq4 import VALUES
from trtc.plugins.six_bits import LEAST, MOST

SCALE_STEPS = 16
"""Between two powers of two of scales in 8 bits (plugins/iq4.py)."""
LEAST_SCALE, LARGEST_SCALE = 2.0**-7, 2.0 - 1 / SCALE_STEPS
"""Of them, in their unit."""
SHARES = 48
"""Scales of a group that are tried."""


@dataclass(frozen=True)
class CodeGrid:
    """Numbers in ascending order; the first is the one of the largest magnitude."""

    numbers: tuple[float, ...]
    shares: tuple[float, float]
    """Of the scale at which a group's largest weight is just represented: those worth trying."""
    byte_scales: bool = False
    """Scales are those of plugins/iq4.py; else bf16."""
    is_e4m3: bool = False
    """Numbers are those of E4M3; else integers below 128."""

    @property
    def code_dtype(self) -> torch.dtype:
        """Of codes while they are decided."""
        return torch.float32 if self.is_e4m3 else torch.int8

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest number of each value, in f32; the last one of NaN."""
        first, last = self.numbers[0], self.numbers[-1]
        if self.is_e4m3:
            values = values.nan_to_num(last).clamp_(first, last)
            return values.to(torch.float8_e4m3fn).float()
        if self.is_contiguous:
            return values.round().clamp_(first, last)
        # A table of halves takes an eighth of the time of torch.bucketize.
        nearest = self.halves.to(values.device)
        halves = (values * 2).ceil_().nan_to_num_(2 * last).clamp_(2 * first, 2 * last)
        index = halves.sub_(2 * first).to(torch.int32)
        return nearest.index_select(0, index.flatten()).view(values.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether all integers from the first number to the last are numbers."""
        return self.numbers[-1] - self.numbers[0] + 1 == len(self.numbers)

    @property
    def tried_shares(self) -> torch.Tensor:
        """[SHARES] f32, from the least to the largest."""
        return torch.linspace(*self.shares, SHARES)

    @cached_property
    def halves(self) -> torch.Tensor:
        """Of every multiple of a half from the first number to the last, the nearest number; of one
        halfway between two, which only such can be, the lower."""
        halfway = [low + high for low, high in pairwise(self.numbers)]
        halves = range(2 * int(self.numbers[0]), 2 * int(self.numbers[-1]) + 1)
        found = [self.numbers[bisect_left(halfway, half)] for half in halves]
        return torch.tensor(found, dtype=torch.float32)

    def scale_unit(self, widest: torch.Tensor, *, by_row: bool = False) -> torch.Tensor:
        """What scales are multiples of, f32, `widest` [N, G, 1] being those before the search: one
        number [], or one a row [N, 1, 1]."""
        size = widest.abs()
        largest = (size.amax((1, 2), keepdim=True) if by_row else size.max()) * self.shares[1]
        unit = torch.exp2(torch.ceil(torch.log2(largest / LARGEST_SCALE)))
        return torch.where((largest > 0) & self.byte_scales, unit, 1.0)

    def round_scales(self, scales: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Scales as they are stored, in f32; none is zero."""
        if not self.byte_scales:
            return scales.bfloat16().float()
        size = (scales.abs() / unit).clamp(LEAST_SCALE, LARGEST_SCALE)
        power = torch.exp2(torch.floor(torch.log2(size)))
        rounded = (size / power * SCALE_STEPS).round() / SCALE_STEPS * power * unit
        return torch.copysign(rounded, scales)


INT4 = CodeGrid(tuple(range(-8, 8)), (0.55, 1.1))
IQ4 = CodeGrid(VALUES, (0.7, 1.2), byte_scales=True)
INT6 = CodeGrid(tuple(range(LEAST, MOST + 1)), (0.8, 1.05))
_E4M3 = (
    *(count * 2.0**-9 for count in range(1, 8)),
    *(count * 2.0 ** (power - 3) for power in range(-6, 9) for count in range(8, 16)),
)[:-1]
"""Those above zero, subnormal ones first; what would be the last is NaN."""
E4M3 = CodeGrid((*(-one for one in reversed(_E4M3)), 0.0, *_E4M3), (0.5, 1.0), is_e4m3=True)
GRIDS = {"i4": INT4, "iq4": IQ4, "i6": INT6}
"""By the weights' type."""
