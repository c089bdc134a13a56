"""Calls of latent attention's operators, for the kernel tests of every target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.support.kernels import KernelCall
from tests.support.operands import Array, random_array, scatter_pages
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import NUMPY_DTYPES

ROWS, POSITIONS, PAGES = 9, 40, 5


@dataclass(frozen=True)
class LatentShape:
    """What stays the same from call to call of one layer."""

    dtype: str = "bf16"
    pool_dtype: str = "bf16"
    num_heads: int = 4
    rank: int = 48
    rotary_dim: int = 16
    nope_dim: int = 24
    page_size: int = 16
    value_dim: int = 16
    top_k: int = 0
    """Tokens of a selection; 0: all are attended to."""

    @property
    def width(self) -> int:
        return self.rank + self.rotary_dim

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rotary_dim


PUBLISHED: Mapping[str, LatentShape] = {
    "DeepSeek-V2-Lite": LatentShape(
        num_heads=16, rank=512, rotary_dim=64, nope_dim=128, value_dim=128
    ),
    "GLM-4.7-Flash": LatentShape(
        num_heads=20, rank=512, rotary_dim=64, nope_dim=192, value_dim=256
    ),
    "Mistral-Small-4": LatentShape(
        num_heads=32, rank=256, rotary_dim=64, nope_dim=64, value_dim=128
    ),
    # Of its 2,048 tokens a few, so that short contexts are longer.
    "DeepSeek-V3.2": LatentShape(
        num_heads=128, rank=512, rotary_dim=64, nope_dim=128, value_dim=128, top_k=256
    ),
    "DeepSeek-V3 fp8": LatentShape("bf16", "f8e4m3", 128, 512, 64, 128, value_dim=128),
}


@dataclass(frozen=True)
class LatentHistory:
    """One sequence's whole history, of which any tail may be a step's new tokens."""

    q: Array
    """[context, heads * width]"""
    latents: Array
    """[context, width]"""
    chosen: Sequence[Array] = ()
    """The positions that each token selects, if there is a selection."""


def random_history(rng: np.random.Generator, shape: LatentShape, context: int) -> LatentHistory:
    q = random_array(rng, context, shape.num_heads * shape.width, dtype=shape.dtype, spread=2)
    latents = random_array(rng, context, shape.width, dtype=shape.pool_dtype)
    chosen = [np.sort(rng.permutation(position + 1)[: shape.top_k]) for position in range(context)]
    return LatentHistory(q, latents, chosen if shape.top_k else ())


def attention_call(
    rng: np.random.Generator,
    shape: LatentShape,
    tails: Sequence[tuple[LatentHistory, int, int]],
) -> KernelCall:
    """A step over (sequence, new tokens, context) triples, whose pages are scattered over a pool of
    which every other slot is NaN."""
    size = shape.page_size
    pages = scatter_pages(rng, size, [(new, context) for _, new, context in tails])
    kind = NUMPY_DTYPES[shape.pool_dtype]
    pool = np.full((pages.num_pages, 1, size, 1, shape.width), np.nan, kind)
    selected: list[Array] = []
    for (sequence, new, context), slots in zip(tails, pages.slots, strict=True):
        pool[slots // size, 0, slots % size, 0] = sequence.latents[:context]
        for chosen in sequence.chosen[context - new : context]:
            row = np.full(shape.top_k, -1, np.int32)
            row[: len(chosen)] = slots[chosen]
            selected.append(row)
    inputs: dict[str, Any] = {
        "q": np.concatenate([s.q[context - new : context] for s, new, context in tails]),
        "pool": pool,
        **pages.inputs,
    }
    if selected:
        inputs["selected"] = np.stack(selected)
    attributes: dict[str, int | float | str] = {
        "num_heads": shape.num_heads,
        "rank": shape.rank,
        "scale": shape.head_dim**-0.5,
    }
    return KernelCall(REGISTRY["latent_attention"], attributes, inputs)


def step_of(shape: LatentShape, kinds: Sequence[tuple[int, int]]) -> KernelCall:
    """A step of (new tokens, context) pairs, whose page table is as wide as an engine's for
    sequences of 1024 tokens."""
    rng = np.random.default_rng(3)
    tails = [(random_history(rng, shape, context), new, context) for new, context in kinds]
    call = attention_call(rng, shape, tails)
    table = np.zeros((len(kinds), 1024 // shape.page_size), np.int32)
    narrow = call.inputs["page_table"]
    assert narrow is not None
    table[:, : narrow.shape[1]] = np.where(narrow < 1 << 29, narrow, 0)
    return replace(call, inputs={**call.inputs, "page_table": table})


def expanding(call: KernelCall, least_new: int, room: int, most_context: int = 0) -> KernelCall:
    """The step, but for the sequences that expanded_latent_attention takes."""
    given = {"least_new": least_new, "room": room, "most_context": most_context}
    return replace(call, attributes={**call.attributes, **given})


def expanded_call(shape: LatentShape, absorbed: KernelCall) -> KernelCall:
    """The prompts of `absorbed` in the expanded form, with queries, weights and results of others
    at random."""
    rng = np.random.default_rng(6)
    tokens, heads = len(np.asarray(absorbed.inputs["q"])), shape.num_heads
    # Weights that leave a latent's scale as it is.
    by = np.float32(shape.rank**-0.5)
    inputs = {name: array for name, array in absorbed.inputs.items() if name != "selected"} | {
        "attended": random_array(rng, tokens, heads * shape.value_dim, dtype=shape.dtype),
        "q": random_array(rng, tokens, heads * shape.head_dim, dtype=shape.dtype, spread=2),
        "keys": (random_array(rng, heads, shape.rank, shape.nope_dim) * by).astype(
            NUMPY_DTYPES[shape.dtype]
        ),
        "values": (random_array(rng, heads, shape.value_dim, shape.rank) * by).astype(
            NUMPY_DTYPES[shape.dtype]
        ),
    }
    attributes = {
        "num_heads": heads,
        "head_dim": shape.head_dim,
        "scale": shape.head_dim**-0.5,
        "least_new": absorbed.attributes["least_new"],
        "room": absorbed.attributes["room"],
        "most_context": absorbed.attributes["most_context"],
    }
    return KernelCall(REGISTRY["expanded_latent_attention"], attributes, inputs)


def write_call(rng: np.random.Generator, shape: LatentShape, *, scaled: bool = False) -> KernelCall:
    """q and kv are columns of one matrix, as a fused linear leaves them."""
    q_columns = shape.num_heads * shape.head_dim
    both = random_array(rng, ROWS, q_columns + shape.width, dtype=shape.dtype, spread=2)
    angles = np.outer(np.arange(POSITIONS), 10.0 ** -np.arange(shape.rotary_dim // 2))
    inputs: dict[str, Any] = {
        "q": both[:, :q_columns],
        "kv": both[:, q_columns:],
        "positions": rng.integers(0, POSITIONS, ROWS).astype(np.int32),
        "slots": rng.permutation(PAGES * shape.page_size)[:ROWS].astype(np.int32),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "norm": random_array(rng, shape.rank),
        "pool": random_array(
            rng, PAGES, 1, shape.page_size, 1, shape.width, dtype=shape.pool_dtype
        ),
    }
    if scaled:
        inputs["q_scale"] = rng.uniform(0.5, 2, POSITIONS).astype(np.float32)
    attributes: dict[str, int | float | str] = {
        "num_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "eps": 1e-6,
    }
    return KernelCall(REGISTRY["latent_kv_write"], attributes, inputs)


def write_calls() -> list[KernelCall]:
    rng = np.random.default_rng(21)
    return [
        write_call(rng, LatentShape("f32", "f32", nope_dim=25, rank=41, rotary_dim=2), scaled=True),
        write_call(rng, LatentShape(rank=512, rotary_dim=64, nope_dim=128, num_heads=3)),
        write_call(rng, LatentShape(pool_dtype="f8e4m3"), scaled=True),
    ]


def head_linear_call(
    rng: np.random.Generator,
    dtype: str,
    *,
    heads: int,
    n: int,
    k: int,
    rest: int,
    rows: int = ROWS,
) -> KernelCall:
    """x is columns of a wider matrix."""
    x = random_array(rng, rows, heads * (k + rest) + 8, dtype=dtype)
    weight = random_array(rng, heads, n, k, dtype=dtype)
    attributes: dict[str, int | float | str] = {"in_dim": k + rest, "out_dim": n + rest}
    inputs = {"x": x[:, : heads * (k + rest)], "weight": weight}
    return KernelCall(REGISTRY["head_linear"], attributes, inputs)


def head_linear_calls() -> list[KernelCall]:
    rng = np.random.default_rng(22)
    return [
        head_linear_call(rng, "f32", heads=3, n=37, k=19, rest=5),
        head_linear_call(rng, "bf16", heads=2, n=512, k=128, rest=64),
        head_linear_call(rng, "bf16", heads=4, n=32, k=48, rest=0, rows=1),
        head_linear_call(rng, "bf16", heads=2, n=128, k=512, rest=0, rows=70),
    ]
