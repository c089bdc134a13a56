"""Weights by recipe: where a graph initialiser's bytes come from, as data.

The graph names tensors and never holds them: a 70B graph is built in seconds. A recipe is read
when its tensor is written into the engine, one tensor at a time, so the builder's memory stays
near the size of the largest tensor. Passes that merge or split weights compose recipes.

Arrays are numpy with ml_dtypes' element types (bfloat16, float8_e4m3fn, int4, uint4).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.rounding import NUMPY_DTYPES, cast

Array = NDArray[Any]


class TensorReader(Protocol):
    """A checkpoint's tensors by name (builder/checkpoint)."""

    def read(self, name: str) -> Array:
        """A read-only view of the file where the layout allows, else a copy."""
        ...


class Recipe(Protocol):
    """How to make one tensor."""

    def load(self, reader: TensorReader) -> Array: ...


@dataclass(frozen=True)
class Load:
    """A tensor of the checkpoint, as stored."""

    name: str

    def load(self, reader: TensorReader) -> Array:
        return reader.read(self.name)


@dataclass(frozen=True)
class Rows:
    """Rows [begin, end) of a tensor."""

    source: Recipe
    begin: int
    end: int

    def load(self, reader: TensorReader) -> Array:
        return self.source.load(reader)[self.begin : self.end]


@dataclass(frozen=True)
class Concat:
    """Tensors joined along their first axis."""

    sources: tuple[Recipe, ...]

    def load(self, reader: TensorReader) -> Array:
        return np.concatenate([source.load(reader) for source in self.sources], axis=0)


@dataclass(frozen=True)
class Stack:
    """Tensors of one shape stacked along a new first axis (experts)."""

    sources: tuple[Recipe, ...]

    def load(self, reader: TensorReader) -> Array:
        return np.stack([source.load(reader) for source in self.sources])


@dataclass(frozen=True)
class Constant:
    """A small tensor computed at build (rope tables, fused scales)."""

    value: Array

    def load(self, reader: TensorReader) -> Array:
        return self.value


@dataclass(frozen=True)
class Cast:
    """A tensor rounded to another element type (a name of protos/dtypes.py)."""

    source: Recipe
    dtype: str

    def load(self, reader: TensorReader) -> Array:
        values = self.source.load(reader)
        return values if values.dtype == NUMPY_DTYPES[self.dtype] else cast(values, self.dtype)


@dataclass(frozen=True)
class Reshape:
    """The same elements under another shape."""

    source: Recipe
    shape: tuple[int, ...]

    def load(self, reader: TensorReader) -> Array:
        return self.source.load(reader).reshape(self.shape)


@dataclass(frozen=True)
class RopeTable:
    """cos or sin of every position's angles: [length, rotary_dim / 2] f32."""

    inv_freq: tuple[float, ...]
    attention_factor: float
    length: int
    function: Literal["cos", "sin"]

    def load(self, reader: TensorReader) -> Array:
        # In f32 throughout, as models are trained: at far positions the rounding shows.
        positions = np.arange(self.length, dtype=np.float32)[:, None]
        angles = positions * np.asarray(self.inv_freq, dtype=np.float32)
        table = np.cos(angles) if self.function == "cos" else np.sin(angles)
        return table * np.float32(self.attention_factor)


@dataclass(frozen=True)
class Apply:
    """A pure function of tensors: unpacking, dequantising, casting, packing for a kernel."""

    function: Callable[..., Array]
    sources: tuple[Recipe, ...]

    def load(self, reader: TensorReader) -> Array:
        return self.function(*(source.load(reader) for source in self.sources))


@dataclass(frozen=True)
class Shard:
    """What one rank of a sharded model has of a tensor: of each part along an axis its own piece.

    The parts are what was merged into the tensor (q, k and v): a rank has some heads of each.
    """

    source: Recipe
    axis: int
    parts: tuple[int, ...]
    """Extents; each is `ranks` equal pieces."""
    ranks: int
    rank: int = 0

    def load(self, reader: TensorReader) -> Array:
        return self.of(self.source.load(reader))

    def of(self, whole: Array) -> Array:
        """The rank's pieces, one after another; a view of the whole if there is one part."""
        pieces, begin = [], 0
        for part in self.parts:
            size = part // self.ranks
            first = begin + self.rank * size
            pieces.append(whole[(slice(None),) * self.axis + (slice(first, first + size),)])
            begin += part
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=self.axis)


@dataclass(frozen=True)
class OnFirstRank:
    """A tensor on rank 0 and zeros on the others: what must be added once to a sum over ranks."""

    source: Recipe
    rank: int = 0

    def load(self, reader: TensorReader) -> Array:
        return self.of(self.source.load(reader))

    def of(self, whole: Array) -> Array:
        return whole if self.rank == 0 else np.zeros_like(whole)


def recipe_of_rank(recipe: Recipe, rank: int) -> Recipe:
    """The same tensor on another rank."""
    if isinstance(recipe, Shard | OnFirstRank):
        return replace(recipe, rank=rank)
    if isinstance(recipe, Apply):
        return replace(recipe, sources=tuple(recipe_of_rank(one, rank) for one in recipe.sources))
    return recipe


def load_ranks(recipe: Recipe, ranks: int, reader: TensorReader) -> Iterator[Array]:
    """A tensor on every rank, one after another; what it is cut from is made once."""
    if isinstance(recipe, Shard | OnFirstRank):
        whole = recipe.source.load(reader)
        yield from (replace(recipe, rank=rank).of(whole) for rank in range(ranks))
    elif isinstance(recipe, Apply) and recipe_of_rank(recipe, ranks - 1) != recipe:
        sources = [load_ranks(one, ranks, reader) for one in recipe.sources]
        yield from (recipe.function(*pieces) for pieces in zip(*sources, strict=True))
    else:
        yield from [recipe.load(reader)] * ranks
