"""Calls of mamba1, for the kernel tests of every target."""

import numpy as np
import torch

from tests.support.operands import Array, random_array
from tests.support.state_calls import STEP, Sequences

Shape = tuple[str, int, int, int]
SHAPES: tuple[Shape, ...] = (("f32", 72, 12, 8), ("bf16", 150, 16, 16))
"""Element type, channels, size of the state, tokens of a page."""
LARGE: tuple[Shape, ...] = (("f32", 1024, 16, 64), ("bf16", 8192, 16, 64), ("bf16", 512, 128, 64))
"""As wide as published layers."""


class Scans(Sequences):
    """Of one shape; states are remembered for some tens of tokens."""

    def __init__(self, dtype: str, channels: int, state_size: int, page_size: int) -> None:
        rng = np.random.default_rng(channels)
        self.dtype, self.channels, self.state_size = dtype, channels, state_size
        widths = {"x": channels, "z": channels, "dt": channels, "b": state_size, "c": state_size}
        rows = [
            {name: random_array(rng, context, n, dtype=dtype) for name, n in widths.items()}
            for context, _ in STEP
        ]
        weights: dict[str, Array | None] = {
            "rate": -np.exp(random_array(rng, state_size, channels, spread=0.5) - 2),
            "dt_bias": random_array(rng, channels) - 1,
            "skip": random_array(rng, channels),
        }
        super().__init__(
            "mamba1",
            rows,
            weights,
            ((1, state_size * channels), "f32"),
            attributes={"channels": channels, "state_size": state_size},
            page_size=page_size,
            seed=channels,
        )

    def __str__(self) -> str:
        return f"{self.dtype}-scan-{self.channels}x{self.state_size}"

    def torch_outputs(self, number: int) -> Array:
        """A whole sequence at once, by Transformers, which takes seconds to import."""
        from transformers.models.jamba.modeling_jamba import mamba_selective_scan

        given = {
            name: torch.tensor(rows.astype(np.float32)).T[None]
            for name, rows in self.rows[number].items()
        }
        weights = {name: torch.tensor(x) for name, x in self.weights.items()}
        found = mamba_selective_scan(
            given["x"],
            given["dt"],
            weights["rate"].T,
            given["b"],
            given["c"],
            D=weights["skip"],
            z=given["z"],
            delta_bias=weights["dt_bias"],
            delta_softplus=True,
        )
        outputs: Array = found[0].T.numpy()
        return outputs


def cases() -> list[Scans]:
    return [Scans(*shape) for shape in SHAPES]
