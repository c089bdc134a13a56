"""Tests that PyTorch runs on a GPU."""

import pytest
import torch


def needs_torch_gpu() -> None:
    """Skip the test that runs if PyTorch has no GPU: its build for CPUs sees none that is there."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
