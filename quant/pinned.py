"""Copies of a GPU's tensors in the CPU's memory."""

import torch


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU: itself, or a copy in pinned memory, which a GPU fills at the speed of
    its bus: a copy into pages that the system has yet to give takes thirty times as long.

    PyTorch keeps pinned memory for further copies, in powers of two: copy what is to stay.
    """
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor)
