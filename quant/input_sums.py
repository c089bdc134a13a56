"""Statistics of the inputs of linears, gathered while a layer computes them."""

from collections.abc import Iterator

import torch
from torch import nn

from trtc.quant.gptq import InputStatistics
from trtc.quant.triangles import add_lower_gram, complete_gram


class InputSums:
    """Sums over the inputs X [T, K] of a site, batch after batch.

    Args:
        exact: what an unquantised layer gets, by batch; None: not compared with it.
    """

    def __init__(self, exact: list[torch.Tensor] | None = None) -> None:
        self._exact: Iterator[torch.Tensor] | None = None if exact is None else iter(exact)
        self._gram: torch.Tensor | None = None
        self._shift: torch.Tensor | None = None

    def add(self, inputs: torch.Tensor) -> None:
        """Of a batch [..., K]."""
        x = inputs.reshape(-1, inputs.shape[-1]).float()
        if self._gram is None:
            self._gram = x.new_zeros(x.shape[1], x.shape[1])
        add_lower_gram(self._gram, x)
        if self._exact is not None:
            moved = next(self._exact) - x
            self._shift = moved.T @ x if self._shift is None else self._shift.addmm_(moved.T, x)

    @torch.inference_mode()
    def statistics(self, depth: int, device: torch.device) -> InputStatistics:
        """Of [depth] channels; of a site that got no token, all channels count alike."""
        if self._gram is None:
            return InputStatistics(torch.eye(depth, device=device))
        complete_gram(self._gram)
        return InputStatistics(self._gram, self._shift)

    def hook(self, linear: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """For quant/layerwise.py's `hooked`."""
        self.add(inputs[0])
