"""Copies of tensors in the CPU's memory."""

import pytest
import torch

from tests.support.torch_gpu import needs_torch_gpu
from trtc.quant.pinned import on_cpu


def test_what_is_on_the_cpu_is_not_copied() -> None:
    tensor = torch.arange(6).view(2, 3).T
    assert on_cpu(tensor) is tensor


@pytest.mark.gpu
def test_copies_are_pinned_and_stay_as_the_gpu_goes_on() -> None:
    needs_torch_gpu()
    whole = torch.arange(12, dtype=torch.int8, device="cuda").view(4, 3)
    for part in (whole[1:3], whole.T):
        wanted = part.cpu()
        found = on_cpu(part)
        whole += 1
        assert found.is_pinned() and found.is_contiguous()
        assert torch.equal(found, wanted)
