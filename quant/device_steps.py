"""Chooses what takes the columns of a block one after the other."""

import torch

from trtc.quant.block_steps import BlockSteps
from trtc.quant.code_grid import CodeGrid
from trtc.quant.torch_steps import TorchSteps


def steps_on(device: torch.device, grid: CodeGrid) -> BlockSteps:
    """Those of a device: on a GPU a step is one kernel, as launches would take longer than what
    they compute."""
    if device.type != "cuda":
        return TorchSteps(grid)
    from trtc.quant.triton_steps import TritonSteps

    return TritonSteps(grid, device)
