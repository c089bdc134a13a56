"""Calls of short_conv and causal_conv, for the kernel tests of every target."""

import numpy as np
import torch
import torch.nn.functional as F

from tests.support.operands import Array, random_array
from tests.support.state_calls import STEP, Sequences

SHAPES = (("f32", 96, 2, False), ("bf16", 72, 2, True), ("bf16", 128, 3, False))
"""Of short_conv: element type, channels, columns of the state, bias."""
PLAIN_SHAPES = (("f32", 88, 3, False), ("bf16", 128, 3, False), ("f32", 72, 2, True))
"""Of causal_conv: the same."""


class Convolutions(Sequences):
    """Of either operator."""

    def __init__(
        self, op: str, dtype: str, channels: int, columns: int, bias: bool = False
    ) -> None:
        rng = np.random.default_rng(channels)
        self.dtype, self.channels, self.columns = dtype, channels, columns
        self.is_gated = op == "short_conv"
        name, width = ("gated", 3 * channels) if self.is_gated else ("x", channels)
        rows = [
            {name: random_array(rng, context, width, dtype=dtype, spread=2)} for context, _ in STEP
        ]
        weights: dict[str, Array | None] = {
            "weight": random_array(rng, columns + 1, channels),
            "bias": random_array(rng, channels) if bias else None,
        }
        super().__init__(op, rows, weights, ((columns, channels), dtype), seed=channels)

    def __str__(self) -> str:
        return f"{self.op}-{self.dtype}-{self.channels}"

    def torch_outputs(self, number: int) -> Array:
        """A whole sequence at once, by torch's convolution."""
        (given,) = self.rows[number].values()
        x = torch.tensor(given.astype(np.float32))
        if not self.is_gated:
            return F.silu(self._torch_convolution(x)).numpy()
        b, c, x = x.chunk(3, dim=1)
        outputs: Array = (c * self._torch_convolution(b * x)).numpy()
        return outputs

    def _torch_convolution(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights["weight"], self.weights["bias"]
        assert weight is not None
        mixed = F.conv1d(
            x.T[None],
            torch.tensor(weight.T[:, None, :].copy()),
            None if bias is None else torch.tensor(bias),
            padding=self.columns,
            groups=self.channels,
        )
        return mixed[0, :, : len(x)].T


def cases() -> list[Convolutions]:
    gated = [Convolutions("short_conv", *shape) for shape in SHAPES]
    return [*gated, *(Convolutions("causal_conv", *shape) for shape in PLAIN_SHAPES)]
