"""Calls of mamba2, for the kernel tests of every target."""

from dataclasses import replace

import numpy as np
import torch

from tests.support.kernels import KernelCall
from tests.support.operands import Array, random_array
from tests.support.state_calls import STEP, Sequences

SHAPES = (
    ("f32", 4, 24, 2, 16, 8, (0.0, 0.0)),
    ("bf16", 4, 16, 1, 24, 32, (0.0, 0.0)),
    ("f32", 2, 80, 2, 40, 16, (0.05, 0.6)),
)
"""Element type, heads, their size, groups, size of the state, tokens of a page, limits of dt."""
LARGE = (
    ("f32", 8, 64, 1, 128, 64, (0.0, 0.0)),
    ("bf16", 16, 64, 2, 128, 64, (0.0, 0.0)),
    ("bf16", 4, 64, 1, 256, 64, (0.001, 0.0)),
)
"""Heads as large as published ones."""
Shape = tuple[str, int, int, int, int, int, tuple[float, float]]
_EPS = 1e-5
_CHUNK = 8


class Recurrences(Sequences):
    """Of one shape; states are remembered for some tens of tokens."""

    def __init__(
        self,
        dtype: str,
        heads: int,
        head_dim: int,
        groups: int,
        state_size: int,
        page_size: int,
        limits: tuple[float, float],
    ) -> None:
        rng = np.random.default_rng(state_size)
        self.dtype, self.heads, self.head_dim = dtype, heads, head_dim
        self.groups, self.state_size, self.limits = groups, state_size, limits
        widths = {
            "xbc": heads * head_dim + 2 * groups * state_size,
            "z": heads * head_dim,
            "dt": heads,
        }
        rows = [
            {name: random_array(rng, context, n, dtype=dtype) for name, n in widths.items()}
            for context, _ in STEP
        ]
        weights: dict[str, Array | None] = {
            "rate": -np.exp(random_array(rng, heads, spread=0.5) - 2),
            "dt_bias": random_array(rng, heads) - 1,
            "skip": random_array(rng, heads),
            "norm": 1 + random_array(rng, heads * head_dim, spread=0.2),
        }
        super().__init__(
            "mamba2",
            rows,
            weights,
            ((heads, state_size * head_dim), "f32"),
            attributes={
                "heads": heads,
                "head_dim": head_dim,
                "groups": groups,
                "state_size": state_size,
                "dt_min": limits[0],
                "dt_max": limits[1],
                "eps": _EPS,
            },
            page_size=page_size,
            seed=state_size,
        )

    def __str__(self) -> str:
        sizes = (self.heads, self.head_dim, self.groups, self.state_size)
        return f"{self.dtype}-{'x'.join(map(str, sizes))}"

    def torch_outputs(self, number: int) -> Array:
        """A whole sequence at once, by Transformers' chunks and its gated norm, which take seconds
        to import."""
        from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

        given = {name: torch.tensor(x.astype(np.float32)) for name, x in self.rows[number].items()}
        weights = {name: torch.tensor(x) for name, x in self.weights.items()}
        width, shared = self.heads * self.head_dim, self.groups * self.state_size
        x, b, c = given["xbc"].split([width, shared, shared], dim=1)
        b, c = (one.reshape(1, -1, self.groups, self.state_size) for one in (b, c))
        least, most = self.limits
        found = nemotron.mamba2_chunk_scan(
            x.reshape(1, -1, self.heads, self.head_dim),
            given["dt"][None],
            weights["rate"],
            b,
            c,
            _CHUNK,
            D=weights["skip"],
            dt_bias=weights["dt_bias"],
            dt_softplus=True,
            dt_limit=(least, most or float("inf")),
        )
        norm = nemotron.NemotronHRMSNormGated(width, width // self.groups, eps=_EPS)
        norm.weight.data = weights["norm"]
        outputs: Array = norm(found.reshape(-1, width), given["z"]).detach().numpy()
        return outputs


def without_norm(call: KernelCall) -> KernelCall:
    """The call as a rank has it whose heads are not all of their group."""
    return replace(call, inputs={**call.inputs, "norm": None}, optional_outputs=("squares",))


def cases() -> list[Recurrences]:
    return [Recurrences(*shape) for shape in SHAPES]
