"""The search for AWQ's scales by Gram matrices finds what running every exponent finds."""

import copy
from typing import Any

import modelopt.torch.quantization as mtq
import pytest
import torch
from torch import nn

from trtc.quant.awq import with_fast_search
from trtc.quant.quiet import quiet_libraries
from trtc.quant.wide_linears import wide_linears


class Toy(nn.Module):
    """Two linears that share an input, one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(256, 64, bias=False)
        self.right = nn.Linear(256, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.left(x)) * self.right(x))


def calibrated(model: nn.Module, text: torch.Tensor, *, fast: bool) -> Any:
    def run(toy: nn.Module) -> None:
        for batch in text.split(64):
            toy(batch)

    loop = with_fast_search(run, lambda toy: toy(text)) if fast else run
    config = copy.deepcopy(mtq.INT4_AWQ_CFG)
    with quiet_libraries(), torch.inference_mode():
        return mtq.quantize(model, config, loop)


@pytest.mark.parametrize("seed", range(3))
def test_the_scales_are_those_of_modelopts_own_search(seed: int) -> None:
    torch.manual_seed(seed)
    model = Toy()
    # A few loud channels, as in real activations: what AWQ is for.
    text = torch.randn(256, 256) * torch.randn(256).exp()
    slow = calibrated(copy.deepcopy(model), text, fast=False)
    fast = calibrated(copy.deepcopy(model), text, fast=True)
    for name in ("left", "right", "down"):
        ours, theirs = fast.get_submodule(name), slow.get_submodule(name)
        scale = ours.input_quantizer.pre_quant_scale
        assert not torch.equal(scale, torch.ones_like(scale))
        torch.testing.assert_close(scale, theirs.input_quantizer.pre_quant_scale)
        torch.testing.assert_close(ours.weight, theirs.weight)
        assert ours.input_quantizer.is_enabled == theirs.input_quantizer.is_enabled


def test_wide_linears_round_as_bf16_does() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 64).bfloat16()
    x = torch.randn(32, 256).bfloat16()
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    with wide_linears(), torch.inference_mode():
        found = linear(x)
        assert nn.Linear(4, 4)(torch.ones(1, 4)).dtype == torch.float32
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=2**-12)
