"""Rotations of weights and activations by Hadamard matrices, before they are rounded."""

import numpy as np
import torch

from trtc.plugins.hadamard import hadamard_product


def rotated(x: torch.Tensor, block: int) -> torch.Tensor:
    """[..., K] f32 times the matrix of plugins/hadamard.py over the root of its size, which keeps
    products of two rotated tensors as they are; of `block` 0 the tensor itself."""
    if not block:
        return x
    matrix = torch.from_numpy(hadamard_product(np.eye(block), block)).to(x.device)
    product: torch.Tensor = x.reshape(-1, block) @ (matrix * block**-0.5)
    return product.reshape(x.shape)
