"""Calls of gated_delta, for the kernel tests of every target."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from tests.support.kernels import KernelCall
from tests.support.operands import Array, random_array, scalar
from tests.support.state_calls import LONG, STEP, Lengths, Sequences

SHAPES = (("f32", 2, 16, 4, 24, 8), ("bf16", 1, 32, 2, 32, 8), ("f32", 2, 24, 2, 80, 32))
"""Element type, key heads, their size, value heads, theirs, tokens of a page."""
OF_LONG_CHUNKS = ("bf16", 1, 32, 2, 48, 128)
LARGE_OF_LONG_CHUNKS = ("bf16", 4, 128, 8, 128, 128)
LARGE = (("f32", 4, 128, 8, 128, 32), ("bf16", 4, 128, 8, 128, 32))
"""Heads as large as published ones."""
BY_CHANNEL = (("f32", 2, 24, 4, 40, 8), ("bf16", 1, 32, 2, 32, 16), ("f32", 2, 16, 2, 80, 32))
"""Of key channels that have decays of their own."""
LARGE_BY_CHANNEL = (("f32", 8, 128, 8, 128, 32), ("bf16", 8, 128, 8, 128, 32))
ALIKE = ("f32", 2, 16, 2, 40, 32)
"""Of rows with the same key."""
WRITTEN_TWICE = (("f32", 2, 24, 4, 48, 8), ("bf16", 2, 24, 2, 48, 32))
"""Of states whose parts may turn their sign."""
LARGE_WRITTEN_TWICE = (("f32", 30, 96, 30, 192, 32), ("bf16", 30, 96, 30, 192, 32))
_STRONG = 3
"""Every so many channels forget nearly all of a state at each row: by factors down to exp(-40)."""
_EPS = 1e-5


class Deltas(Sequences):
    """Of one shape; states are remembered for some tens of tokens."""

    def __init__(
        self,
        dtype: str,
        key_heads: int,
        key_dim: int,
        value_heads: int,
        value_dim: int,
        page_size: int,
        *,
        by_channel: bool = False,
        alike: bool = False,
        write_scale: float = 1.0,
        lengths: Lengths = STEP,
    ) -> None:
        """
        Args:
            alike: all rows of a history have the same query and the same key, and little is
                forgotten, as in a prompt of one token over and over.
        """
        rng = np.random.default_rng(value_dim)
        self.dtype, self.key_heads, self.value_heads = dtype, key_heads, value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.decays = key_dim if by_channel else 1
        self.alike, self.write_scale = alike, write_scale
        widths = {
            "qkv": 2 * key_heads * key_dim + value_heads * value_dim,
            "z": value_heads * value_dim,
            "b": value_heads,
            "a": value_heads * self.decays,
        }
        rows = [
            {name: random_array(rng, context, n, dtype=dtype) for name, n in widths.items()}
            for context, _ in lengths
        ]
        if by_channel:
            for one in rows:
                one["a"][:, ::_STRONG] += 200
        if alike:
            for one in rows:
                one["qkv"][:, : 2 * key_heads * key_dim] = one["qkv"][0, : 2 * key_heads * key_dim]
                one["b"] += 3
                one["a"] -= 3
                one["z"] /= 2  # sums that cancel are not as exact as others
        weights: dict[str, Array | None] = {
            "rate": -np.exp(random_array(rng, value_heads, spread=0.5) - 2),
            "dt_bias": random_array(rng, value_heads * self.decays),
            "norm": 1 + random_array(rng, value_dim, spread=0.2),
        }
        super().__init__(
            "gated_delta",
            rows,
            weights,
            ((value_heads, key_dim * value_dim), "f32"),
            attributes={
                "key_heads": key_heads,
                "key_dim": key_dim,
                "value_heads": value_heads,
                "value_dim": value_dim,
                "decays": self.decays,
                "write_scale": write_scale,
                "gate": "sigmoid" if by_channel else "silu",
                "eps": _EPS,
                "out_dtype": dtype,
            },
            page_size=page_size,
            seed=value_dim,
            lengths=lengths,
        )

    def __str__(self) -> str:
        sizes = (self.key_heads, self.key_dim, self.value_heads, self.value_dim)
        kind = "-by-channel" * (self.decays > 1) + "-alike" * self.alike
        kind += f"-writing-{self.write_scale:g}" * (self.write_scale != 1)
        kind += "-long" * (self.lengths == LONG)
        return f"{self.dtype}-{'x'.join(map(str, sizes))}{kind}"

    def torch_outputs(self, number: int) -> Array:
        """A whole sequence at once, by Transformers' chunks, or by its rows where channels have
        decays, and its gated norm, which take seconds to import."""
        from transformers.models.kimi_linear import modeling_kimi_linear as kimi
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen

        given = {name: torch.tensor(x.astype(np.float32)) for name, x in self.rows[number].items()}
        weights = {name: torch.tensor(x) for name, x in self.weights.items()}
        keys = self.key_heads * self.key_dim
        q, k, v = given["qkv"].split([keys, keys, self.value_heads * self.value_dim], dim=1)
        q, k = (one.reshape(1, -1, self.key_heads, self.key_dim) for one in (q, k))
        v = v.reshape(1, -1, self.value_heads, self.value_dim)
        beta = self.write_scale * given["b"].sigmoid()[None]
        steps = F.softplus(given["a"] + weights["dt_bias"])
        if self.decays > 1:
            shared = self.value_heads // self.key_heads
            q, k = (one.repeat_interleave(shared, dim=2) for one in (q, k))
            decays = weights["rate"][:, None] * steps.reshape(1, -1, self.value_heads, self.key_dim)
            found, _ = kimi.recurrent_kimi_delta_attention(
                q, k, v, decays, beta, None, False, use_qk_l2norm_in_kernel=True
            )
            norm = kimi.KimiLinearRMSNormGated(self.value_dim, eps=_EPS)
        else:
            decays = (weights["rate"] * steps)[None]
            found, _ = qwen.torch_chunk_gated_delta_rule(
                q, k, v, g=decays, beta=beta, use_qk_l2norm_in_kernel=True
            )
            norm = qwen.Qwen3NextRMSNormGated(self.value_dim, eps=_EPS)
        norm.weight.data = weights["norm"]
        z = given["z"].reshape(-1, self.value_heads, self.value_dim)
        outputs: Array = norm(found[0], z).detach().reshape(len(z), -1).numpy()
        return outputs


def quantized(call: KernelCall, out_dtype: str) -> KernelCall:
    """The same call, with codes as its result."""
    width = int(call.output_types["out"].shape[1])
    scales: dict[str, Array] = {
        "pre_scale": np.random.default_rng(5).uniform(0.5, 2, width).astype(np.float32),
        "out_scale": scalar(0.02),
    }
    attributes = {**call.attributes, "out_dtype": out_dtype}
    return replace(call, attributes=attributes, inputs={**call.inputs, **scales})


def cases() -> list[Deltas]:
    by_channel = (Deltas(*shape, by_channel=True) for shape in BY_CHANNEL)
    twice = (Deltas(*shape, write_scale=2.0) for shape in WRITTEN_TWICE)
    alike = (
        Deltas(*ALIKE, alike=True),
        Deltas(*ALIKE, alike=True, by_channel=True),
        Deltas(*ALIKE, alike=True, write_scale=2.0),
    )
    long = (Deltas(*OF_LONG_CHUNKS, lengths=LONG, alike=alike) for alike in (False, True))
    return [*(Deltas(*shape) for shape in SHAPES), *by_channel, *twice, *alike, *long]
