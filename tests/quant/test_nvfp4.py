"""NVFP4's rounding on a CPU, against a slow one that looks for the nearest of all values."""

from types import SimpleNamespace

import torch

from tests.support.fake_quantized import fake_quantize_blocks
from trtc.quant.nvfp4 import fake_quantize

UNIT = 2.0**-7


def quantizer(unit: float) -> SimpleNamespace:
    return SimpleNamespace(amax=torch.tensor(unit * 6 * 448))


def test_random_blocks_round_to_the_nearest() -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = fake_quantize_blocks(x, torch.tensor(UNIT))
    assert torch.equal(fake_quantize(x, quantizer(UNIT)), expected)
    assert not torch.equal(expected, x)


def test_ties_go_to_even_codes_and_signs_stay() -> None:
    """A block whose largest value is 6 units: its scale is 1 unit, exactly."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    block = torch.tensor([*ties, *(-value for value in ties)]) * UNIT
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    found = fake_quantize(block, quantizer(UNIT)) / UNIT
    assert found.tolist() == [*even, *(-value for value in even)]


def test_blocks_of_zeros_stay_zero_and_large_ones_saturate() -> None:
    x = torch.zeros(2, 16)
    x[1, 3] = 1e6
    found = fake_quantize(x, quantizer(UNIT))
    assert found[0].tolist() == [0.0] * 16
    assert float(found[1, 3]) == 6 * 448 * UNIT
