"""What formats of a KV cache cost a model: KL against the unquantised one, at equal text.

    python -m examples.bench.kv_formats MODEL [--tokens N] [--outliers]

The model runs in f32 by Transformers; keys are rounded after the rotary embedding, and values, as
a format would store them, but for scales, which stay f32: f16 would differ by less than the figures
show. Weights and activations stay as they are. Bits are of an element, scales included, for heads
as wide as the model's.

--outliers multiplies a few channels of the keys by up to 8 and divides those of the queries by as
much. The model is the same; its keys are as uneven as published ones of large models.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from examples.bench.accuracy import held_out
from trtc.plugins.iq4 import VALUES
from trtc.plugins.rounding import LEAST_MAGNITUDE
from trtc.quant.reference_model import load_model

Tensor = torch.Tensor
E4M3_MAX = float(torch.finfo(torch.float8_e4m3fn).max)
Rounding = Callable[[Tensor], Tensor]
OUTLIERS = {28 / 64: 8.0, 25 / 64: 4.0, 31 / 64: 6.0}
"""Share of the head's width -> factor of that channel and of the one that rope turns it with."""


@dataclass(frozen=True)
class Format:
    """How keys and values are stored."""

    name: str
    scale_bits: int
    """Of a group's scale, its zero included."""
    group: int
    """Channels of a scale; 0: the head."""
    keys: Rounding | None
    values: Rounding | None
    turns_keys: bool = False
    turns_values: bool = False
    bits: int = 4
    scale_of: str = ""
    """What has a scale, where it is not a group of one token's channels."""

    def bits_of(self, head_dim: int) -> float:
        return self.bits + self.scale_bits / (self.group or head_dim)


def in_groups(rounding: Rounding, group: int) -> Rounding:
    """A rounding of the last axis, in groups of so many channels; 0: of all."""

    def grouped(x: Tensor) -> Tensor:
        parts = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
        return rounding(parts).reshape(x.shape)

    return grouped


def symmetric(x: Tensor, largest: float) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(LEAST_MAGNITUDE) / largest
    return torch.round(x / scale).clamp(-largest - 1, largest) * scale


def halves(x: Tensor) -> Tensor:
    """Codes n + 1/2: no zero, and as many on both sides."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(LEAST_MAGNITUDE) / 7.5
    return (torch.floor(x / scale).clamp(-8, 7) + 0.5) * scale


def signed(x: Tensor) -> Tensor:
    """-8 is the number of largest magnitude, whatever its sign."""
    scale = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -8
    scale = torch.where(scale.abs() < LEAST_MAGNITUDE, LEAST_MAGNITUDE, scale)
    return torch.round(x / scale).clamp(-8, 7) * scale


def clipped(x: Tensor) -> Tensor:
    """Symmetric, by the scale of seven with the least squared error."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(LEAST_MAGNITUDE)
    scales = [largest * c / 7 for c in (1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)]
    tries = [torch.round(x / scale).clamp(-8, 7) * scale for scale in scales]
    stacked = torch.stack(tries)
    best = (stacked - x).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return stacked.gather(0, best.expand(1, *x.shape))[0]


def with_zero(x: Tensor) -> Tensor:
    """Codes between the least and the largest."""
    low = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - low) / 15).clamp_min(LEAST_MAGNITUDE)
    return torch.round((x - low) / scale).clamp(0, 15) * scale + low


def by_table(x: Tensor) -> Tensor:
    """The 16 values of iq4."""
    table = torch.tensor(VALUES, dtype=torch.float32)
    table = table / table.abs().max()
    scale = x.abs().amax(-1, keepdim=True).clamp_min(LEAST_MAGNITUDE)
    return table[torch.bucketize(x / scale, (table[1:] + table[:-1]) / 2)] * scale


def e4m3(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """With a scale of all along `axes` of [sequence, head, token, group, channel]: what calibration
    on this very text would find. No axes: 1."""
    scale = x.abs().amax(axes, keepdim=True) / E4M3_MAX if axes else torch.ones(())
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def formats() -> list[Format]:
    of_eight_bits = [
        Format("e4m3", 0, 0, rounding, rounding, bits=8, scale_of=scale_of)
        for scale_of, axes in (("1", ()), ("a layer", (0, 1, 2, 3, 4)), ("a head", (0, 2, 3, 4)))
        for rounding in (functools.partial(e4m3, axes=axes),)
    ]
    e4m3_of_heads = functools.partial(e4m3, axes=(-1,))
    seven = functools.partial(symmetric, largest=7.0)
    eight_bits = functools.partial(symmetric, largest=127.0)
    found = [
        *of_eight_bits,
        Format("e4m3", 32, 0, e4m3_of_heads, e4m3_of_heads, bits=8),
        Format("int8", 32, 0, eight_bits, eight_bits, bits=8),
        Format("symmetric -7..7", 32, 0, seven, seven),
        Format("symmetric -7..7, keys alone", 32, 0, seven, None),
        Format("symmetric -7..7, values alone", 32, 0, None, seven),
        Format("symmetric, scale searched", 32, 0, clipped, clipped),
        Format("half codes", 32, 0, halves, halves),
        Format("signed scale", 32, 0, signed, signed),
        Format("scale and zero", 32, 0, with_zero, with_zero),
        Format("iq4", 32, 0, by_table, by_table),
    ]
    for group, turns in ((32, False), (0, True), (32, True)):
        found += [
            Format(name, bits if group else 32, group, rounding, rounding, turns)
            for name, bits, rounding in (
                ("half codes", 16, halves),
                ("signed scale", 16, signed),
                ("scale and zero", 32, with_zero),
                ("iq4", 16, by_table),
            )
        ]
    return [*found, Format("signed scale", 32, 0, signed, signed, True, True)]


def hadamard(width: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(width)


def attention(of: Format | None, outliers: bool) -> Callable[..., Any]:
    """Transformers' attention with keys and values as they come from a cache."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
    ) -> Any:
        width = key.shape[-1]
        turn = hadamard(width)
        if outliers:
            factors = torch.ones(width)
            for share, factor in OUTLIERS.items():
                factors[[int(share * width), int(share * width) + width // 2]] = factor
            query, key = query / factors, key * factors
        if of and of.turns_keys:
            query, key = query @ turn, key @ turn
        if of and of.turns_values:
            value = value @ turn
        if of and of.keys:
            key = in_groups(of.keys, of.group)(key)
        if of and of.values:
            value = in_groups(of.values, of.group)(value)
        out, weights = sdpa_attention_forward(module, query, key, value, mask, **given)
        return (out @ turn if of and of.turns_values else out), weights

    return attend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--outliers", action="store_true")
    asked = parser.parse_args()
    model = load_model(asked.model, "float32")
    ALL_MASK_ATTENTION_FUNCTIONS.register("cached", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    ALL_ATTENTION_FUNCTIONS.register("cached", sdpa_attention_forward)
    model.set_attn_implementation("cached")
    texts = held_out(asked.model, asked.tokens)

    def log_probabilities() -> Iterator[Tensor]:
        for ids in texts.sequences:
            with torch.no_grad():
                logits = model(torch.from_numpy(ids[None].astype("int64"))).logits[0]
            yield torch.log_softmax(logits.float(), -1)

    reference = list(log_probabilities())
    head_dim = int(model.config.head_dim)
    print("| keys turned | format | a scale of | bits | KL | top-1 |\n|---|---|---|---|---|---|")
    for one in formats():
        ALL_ATTENTION_FUNCTIONS.register("cached", attention(one, asked.outliers))
        pairs = list(zip(reference, log_probabilities(), strict=True))
        kl = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in pairs])
        same = torch.cat([(a.argmax(-1) == b.argmax(-1)).float() for a, b in pairs])
        turned = "values too" if one.turns_values else "yes" if one.turns_keys else ""
        print(
            f"| {turned} | {one.name} | {one.scale_of or one.group or 'a token and head'} "
            f"| {one.bits_of(head_dim):.2f} "
            f"| {kl.mean():.4f} ± {kl.std() / math.sqrt(len(kl)):.4f} | {same.mean() * 100:.1f}% |",
            flush=True,
        )


if __name__ == "__main__":
    main()
