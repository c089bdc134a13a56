"""Calls of the operators that select tokens, for the kernel tests of every target."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.support.kernels import KernelCall
from tests.support.operands import Array, random_array, scatter_pages
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import NUMPY_DTYPES

ROWS, POSITIONS, PAGES = 9, 40, 5
MAX_CONTEXT = 1200


@dataclass(frozen=True)
class IndexShape:
    """What stays the same from call to call of one layer."""

    dtype: str = "bf16"
    pool_dtype: str = "bf16"
    num_heads: int = 16
    width: int = 24
    rotary_dim: int = 16
    page_size: int = 16
    top_k: int = 20


@dataclass(frozen=True)
class IndexHistory:
    """One sequence's whole history, of which any tail may be a step's new tokens."""

    q: Array
    """[context, heads * width]"""
    weights: Array
    """[context, heads]"""
    keys: Array
    """[context, width]"""


def random_history(
    rng: np.random.Generator, shape: IndexShape, context: int, *, whole: bool = False
) -> IndexHistory:
    """`whole`: of small whole numbers, whose sums are exact, and scores often equal."""

    def array(columns: int, dtype: str) -> Array:
        if whole:
            numbers = rng.integers(-2, 3, (context, columns)).astype(np.float32)
            return numbers.astype(NUMPY_DTYPES[dtype])
        return random_array(rng, context, columns, dtype=dtype)

    q = array(shape.num_heads * shape.width, shape.dtype)
    return IndexHistory(q, array(shape.num_heads, "f32"), array(shape.width, shape.pool_dtype))


def select_call(
    rng: np.random.Generator,
    shape: IndexShape,
    tails: Sequence[tuple[IndexHistory, int, int]],
) -> KernelCall:
    """A step over (sequence, new tokens, context) triples, whose pages are scattered over a pool of
    which every other slot is NaN."""
    size = shape.page_size
    pages = scatter_pages(rng, size, [(new, context) for _, new, context in tails])
    kind = NUMPY_DTYPES[shape.pool_dtype]
    pool = np.full((pages.num_pages, 1, size, 1, shape.width), np.nan, kind)
    for (sequence, _, context), slots in zip(tails, pages.slots, strict=True):
        pool[slots // size, 0, slots % size, 0] = sequence.keys[:context]

    def new_rows(name: str) -> Array:
        return np.concatenate(
            [getattr(s, name)[context - new : context] for s, new, context in tails]
        )

    inputs: dict[str, Any] = {
        "q": new_rows("q"),
        "weights": new_rows("weights"),
        "pool": pool,
        **pages.inputs,
    }
    attributes: dict[str, int | float | str] = {
        "num_heads": shape.num_heads,
        "top_k": shape.top_k,
        "max_context": MAX_CONTEXT,
    }
    return KernelCall(REGISTRY["select_tokens"], attributes, inputs)


def step_of(
    shape: IndexShape, kinds: Sequence[tuple[int, int]], *, whole: bool = True
) -> KernelCall:
    """A step of (new tokens, context) pairs, whose page table is as wide as an engine's for
    sequences of 1024 tokens."""
    rng = np.random.default_rng(3)
    tails = [
        (random_history(rng, shape, context, whole=whole), new, context) for new, context in kinds
    ]
    return in_engine(select_call(rng, shape, tails))


def in_engine(call: KernelCall) -> KernelCall:
    """The call as an engine for sequences of 1024 tokens makes it."""
    narrow, pool = np.asarray(call.inputs["page_table"]), np.asarray(call.inputs["pool"])
    table = np.zeros((len(narrow), 1024 // pool.shape[2]), np.int32)
    width = min(narrow.shape[1], table.shape[1])
    table[:, :width] = np.where(narrow < 1 << 29, narrow, 0)[:, :width]
    return replace(
        call,
        attributes={**call.attributes, "max_context": 1024},
        inputs={**call.inputs, "page_table": table},
    )


def positions_of(call: KernelCall, selected: Array) -> list[list[int]]:
    """The positions that each row selects, from the slots."""
    pool, table = np.asarray(call.inputs["pool"]), np.asarray(call.inputs["page_table"])
    size, starts = pool.shape[2], np.asarray(call.inputs["query_start"])
    found = []
    for sequence, context in enumerate(np.asarray(call.inputs["context_lens"])):
        positions = np.arange(int(context))
        slots = table[sequence][positions // size] * size + positions % size
        where = {int(slot): position for position, slot in enumerate(slots)}
        for row in range(starts[sequence], starts[sequence + 1]):
            found.append([where[int(slot)] for slot in selected[row] if slot >= 0])
    return found


def write_call(rng: np.random.Generator, shape: IndexShape) -> KernelCall:
    """q and k are columns of one matrix, as a fused linear leaves them."""
    columns = shape.num_heads * shape.width
    both = random_array(rng, ROWS, columns + shape.width, dtype=shape.dtype, spread=2)
    angles = np.outer(np.arange(POSITIONS), 10.0 ** -np.arange(shape.rotary_dim // 2))
    inputs: dict[str, Any] = {
        "q": both[:, :columns],
        "k": both[:, columns:],
        "positions": rng.integers(0, POSITIONS, ROWS).astype(np.int32),
        "slots": rng.permutation(PAGES * shape.page_size)[:ROWS].astype(np.int32),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "norm": random_array(rng, shape.width),
        "bias": random_array(rng, shape.width),
        "pool": random_array(
            rng, PAGES, 1, shape.page_size, 1, shape.width, dtype=shape.pool_dtype
        ),
    }
    attributes: dict[str, int | float | str] = {"num_heads": shape.num_heads, "eps": 1e-6}
    return KernelCall(REGISTRY["index_write"], attributes, inputs)


def write_calls() -> list[KernelCall]:
    rng = np.random.default_rng(21)
    return [
        write_call(rng, IndexShape("f32", "f32", num_heads=3)),
        write_call(rng, IndexShape(width=128, rotary_dim=64)),
        write_call(rng, IndexShape(pool_dtype="f8e4m3", width=16)),
    ]
