"""Operands for kernel tests: random arrays by element type, and paged attention batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.kernels import KernelCall
from trtc.plugins.kv_pool import PagedHeads, code_width
from trtc.plugins.paged_attention.op import PAGED_ATTENTION
from trtc.plugins.rounding import NUMPY_DTYPES, cast
from trtc.protos.kv import SCALE_BYTES

Array = NDArray[Any]


def random_array(
    rng: np.random.Generator, *shape: int, dtype: str = "f32", spread: float = 1.0
) -> Array:
    """Normal values rounded to `dtype`."""
    return cast(rng.standard_normal(shape).astype(np.float32) * np.float32(spread), dtype)


def scalar(value: float) -> Array:
    """A 0-dimensional f32 tensor."""
    return np.asarray(value, np.float32)


@dataclass(frozen=True)
class AttentionShape:
    """What stays the same from call to call of one attention layer."""

    dtype: str = "bf16"
    pool_dtype: str = "bf16"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    window: int = 0
    softcap: float = 0.0
    out_dtype: str = ""
    """Empty: `dtype`."""
    sinks: bool = False
    chunked: int = 0

    @property
    def quantised(self) -> bool:
        return self.out_dtype in ("f8e4m3", "i8")


@dataclass(frozen=True)
class History:
    """One sequence's whole history, of which any tail may be a step's new tokens."""

    q: Array
    """[context, heads * D]"""
    kv: Array
    """[context, 2, kv_heads, D]"""


def attention_sinks(num_heads: int) -> Array:
    """[num_heads] f32: among the scores, and above and below all of them."""
    sinks = np.random.default_rng(8).uniform(-2, 4, num_heads).astype(np.float32)
    sinks[:2] = 60, -60
    return sinks


def random_sequence(rng: np.random.Generator, shape: AttentionShape, context: int) -> History:
    q = random_array(rng, context, shape.num_heads * shape.head_dim, dtype=shape.dtype, spread=2)
    stored = "f32" if shape.pool_dtype in ("i8", "u8") else shape.pool_dtype
    kv = random_array(rng, context, 2, shape.num_kv_heads, shape.head_dim, dtype=stored)
    return History(q, kv)


def stale_pool(num_pages: int, page_size: int, heads: int, head_dim: int, dtype: str) -> Array:
    """A pool of keys and values whose every slot is NaN."""
    if dtype not in ("i8", "u8"):
        shape = (num_pages, 2, page_size, heads, head_dim)
        return np.full(shape, np.nan, NUMPY_DTYPES[dtype])
    stored = code_width(dtype, head_dim) + SCALE_BYTES["i8"]
    pool = np.full((num_pages, 2, page_size, heads, stored), 99, NUMPY_DTYPES[dtype])
    scales = PagedHeads(pool, head_dim).scales
    assert scales is not None
    scales[...] = np.nan
    return pool


@dataclass(frozen=True)
class ScatteredPages:
    """Where the tokens of a step's sequences are: pages at random places of a pool."""

    num_pages: int
    """Three more than the sequences have."""
    slots: list[Array]
    """Of each sequence, those of its tokens."""
    inputs: dict[str, Any]
    """Of an operator that finds them."""


def scatter_pages(
    rng: np.random.Generator, page_size: int, parts: Sequence[tuple[int, int]]
) -> ScatteredPages:
    """For sequences of (new tokens, context). Entries of the page table past a context are out of
    range."""
    counts = [-(-context // page_size) for _, context in parts]
    num_pages = sum(counts) + 3
    pages = rng.permutation(num_pages).astype(np.int32)
    table = np.full((len(parts), max(counts) + 2), 1 << 30, np.int32)
    slots = []
    for row, (_, context) in enumerate(parts):
        mine, pages = pages[: counts[row]], pages[counts[row] :]
        table[row, : counts[row]] = mine
        positions = np.arange(context)
        slots.append(mine[positions // page_size] * page_size + positions % page_size)
    inputs = {
        "query_start": np.cumsum([0, *(new for new, _ in parts)]).astype(np.int32),
        "context_lens": np.array([context for _, context in parts], np.int32),
        "page_table": table,
    }
    return ScatteredPages(num_pages, slots, inputs)


def attention_call(
    rng: np.random.Generator,
    shape: AttentionShape,
    tails: Sequence[tuple[History, int, int]],
) -> KernelCall:
    """A step over (sequence, new tokens, context) triples, whose pages are scattered over a pool of
    which every other slot is NaN."""
    size = shape.page_size
    pages = scatter_pages(rng, size, [(new, context) for _, new, context in tails])
    pool = stale_pool(pages.num_pages, size, shape.num_kv_heads, shape.head_dim, shape.pool_dtype)
    written = PagedHeads(pool, shape.head_dim)
    for (sequence, _, context), slots in zip(tails, pages.slots, strict=True):
        for plane in (0, 1):
            written.write(plane, slots, sequence.kv[:context, plane].astype(np.float32))
    inputs = {
        "q": np.concatenate([s.q[context - new : context] for s, new, context in tails]),
        "pool": pool,
        **pages.inputs,
    }
    if shape.pool_dtype == "f8e4m3":
        inputs |= {"k_scale": scalar(0.75), "v_scale": scalar(1.5)}
    if shape.quantised:
        columns = shape.num_heads * shape.head_dim
        scales = np.random.default_rng(7).uniform(0.5, 2, columns).astype(np.float32)
        inputs |= {"pre_scale": scales, "out_scale": scalar(0.01)}
    if shape.sinks:
        inputs["sinks"] = attention_sinks(shape.num_heads)
    attributes = {
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "scale": shape.head_dim**-0.5,
        "window": shape.window,
        "chunked": shape.chunked,
        "softcap": shape.softcap,
        "out_dtype": shape.out_dtype or shape.dtype,
    }
    return KernelCall(PAGED_ATTENTION, attributes, inputs)
