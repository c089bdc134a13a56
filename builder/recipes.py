"""Recipes of weights: how to make the bytes of a graph's initialiser, as data.

The graph names tensors and never holds them: a 70B graph is built in seconds. A recipe is read
when its tensor is written into the engine, one tensor at a time, so the builder's memory stays
near the size of the largest tensor. Passes that merge or split weights compose recipes.

Arrays are numpy with ml_dtypes' element types (bfloat16, float8_e4m3fn, int4, uint4).
"""

from abc import ABC, abstractmethod
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


class OfOne(ABC):
    """A recipe made from one other."""

    source: Recipe

    def load(self, reader: TensorReader) -> Array:
        return self.of(self.source.load(reader))

    @abstractmethod
    def of(self, source: Array) -> Array:
        """The tensor, given its source's."""


class OfMany(ABC):
    """A recipe made from several others."""

    sources: tuple[Recipe, ...]

    def load(self, reader: TensorReader) -> Array:
        return self.of(*(source.load(reader) for source in self.sources))

    @abstractmethod
    def of(self, *sources: Array) -> Array:
        """The tensor, given its sources' in their order."""


@dataclass(frozen=True)
class Load:
    """A tensor of the checkpoint, as stored."""

    name: str

    def load(self, reader: TensorReader) -> Array:
        return reader.read(self.name)


@dataclass(frozen=True)
class Rows(OfOne):
    """Rows [begin, end) of a tensor."""

    source: Recipe
    begin: int
    end: int

    def of(self, source: Array) -> Array:
        return source[self.begin : self.end]


@dataclass(frozen=True)
class Concat(OfMany):
    """Tensors joined along their first axis."""

    sources: tuple[Recipe, ...]

    def of(self, *sources: Array) -> Array:
        return np.concatenate(sources, axis=0)


@dataclass(frozen=True)
class Stack(OfMany):
    """Tensors of one shape stacked along a new first axis (experts)."""

    sources: tuple[Recipe, ...]

    def of(self, *sources: Array) -> Array:
        return np.stack(sources)


@dataclass(frozen=True)
class Constant:
    """A small tensor computed at build (rope tables, fused scales)."""

    value: Array

    def load(self, reader: TensorReader) -> Array:
        return self.value


@dataclass(frozen=True)
class Cast(OfOne):
    """A tensor rounded to another element type (a name of protos/dtypes.py)."""

    source: Recipe
    dtype: str

    def of(self, source: Array) -> Array:
        return source if source.dtype == NUMPY_DTYPES[self.dtype] else cast(source, self.dtype)


@dataclass(frozen=True)
class Reshape(OfOne):
    """The same elements under another shape."""

    source: Recipe
    shape: tuple[int, ...]

    def of(self, source: Array) -> Array:
        return source.reshape(self.shape)


@dataclass(frozen=True)
class RopeTable:
    """cos or sin of every position's angles: [short_length + length, rotary_dim / 2] f32.

    Positions 0 to short_length - 1 by `short_inv_freq`, then 0 to length - 1 by `inv_freq`.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float
    length: int
    function: Literal["cos", "sin"]
    short_inv_freq: tuple[float, ...] = ()
    short_length: int = 0

    def load(self, reader: TensorReader) -> Array:
        angles = _angles(self.inv_freq, self.length)
        if self.short_length:
            angles = np.concatenate((_angles(self.short_inv_freq, self.short_length), angles))
        table = np.cos(angles) if self.function == "cos" else np.sin(angles)
        return table * np.float32(self.attention_factor)


@dataclass(frozen=True)
class QueryScaleTable:
    """[length] f32: 1 + beta * ln(1 + floor((p + offset) / original_length)) of each position p."""

    beta: float
    original_length: int
    length: int
    offset: int = 0

    def load(self, reader: TensorReader) -> Array:
        steps = (np.arange(self.length, dtype=np.int64) + self.offset) // self.original_length
        return np.float32(1) + np.float32(self.beta) * np.log1p(steps.astype(np.float32))


def _angles(inv_freq: tuple[float, ...], length: int) -> Array:
    """[length, len(inv_freq)]. In f32 throughout, as models are trained: at far positions the
    rounding shows."""
    positions = np.arange(length, dtype=np.float32)[:, None]
    return positions * np.asarray(inv_freq, dtype=np.float32)


@dataclass(frozen=True)
class Apply(OfMany):
    """A pure function of tensors: unpacking, dequantising, casting, packing for a kernel."""

    function: Callable[..., Array]
    sources: tuple[Recipe, ...]

    def of(self, *sources: Array) -> Array:
        return self.function(*sources)


@dataclass(frozen=True)
class Shard(OfOne):
    """One rank's shard of a tensor: its slice of each part along an axis.

    The parts are the tensors that were merged into it (q, k and v): a rank has some heads of each.
    """

    source: Recipe
    axis: int
    parts: tuple[int, ...]
    """Extents; each is divided into `ranks` slices of one size, or into its `shares`."""
    ranks: int
    rank: int = 0
    shares: tuple[int, ...] = ()
    """Into how many slices each part is divided, where that is not `ranks`: neighbouring ranks have
    the same slice then."""
    pieces: tuple[int, ...] = ()
    """Extents within each part that are not divided, where that is not 1. Slices have as many
    pieces; where the shares do not divide them, the last slices begin within those before."""

    def of(self, source: Array) -> Array:
        """The rank's slices, concatenated; a view of the source if there is one part."""
        slices, begin = [], 0
        shares = self.shares or (self.ranks,) * len(self.parts)
        pieces = self.pieces or (1,) * len(self.parts)
        for part, share, piece in zip(self.parts, shares, pieces, strict=True):
            size = -(-part // (share * piece)) * piece
            first = begin + min(self.rank * share // self.ranks * size, part - size)
            slices.append(source[(slice(None),) * self.axis + (slice(first, first + size),)])
            begin += part
        return slices[0] if len(slices) == 1 else np.concatenate(slices, axis=self.axis)


@dataclass(frozen=True)
class OnFirstRank(OfOne):
    """A tensor on rank 0 and zeros on the others: what must be added once to a sum over ranks."""

    source: Recipe
    rank: int = 0

    def of(self, source: Array) -> Array:
        return source if self.rank == 0 else np.zeros_like(source)


def recipe_of_rank(recipe: Recipe, rank: int) -> Recipe:
    """The same tensor on another rank, however deep in the recipe the ranks differ."""
    changes: dict[str, Any] = {}
    if isinstance(recipe, Shard | OnFirstRank):
        changes["rank"] = rank
    if isinstance(recipe, OfOne):
        changes["source"] = recipe_of_rank(recipe.source, rank)
    if isinstance(recipe, OfMany):
        changes["sources"] = tuple(recipe_of_rank(source, rank) for source in recipe.sources)
    one: Any = recipe  # every recipe that is made from others is a dataclass
    return replace(one, **changes) if changes else recipe


def load_ranks(recipe: Recipe, ranks: int, reader: TensorReader) -> Iterator[Array]:
    """A tensor on every rank, one after another. Sources that all ranks share are loaded once."""
    if not _differs_by_rank(recipe):
        yield from [recipe.load(reader)] * ranks
        return
    of_ranks = [load_ranks(source, ranks, reader) for source in _sources(recipe)]
    for rank, sources in enumerate(zip(*of_ranks, strict=True)):
        of_rank: Any = recipe_of_rank(recipe, rank)
        yield of_rank.of(*sources)


def _differs_by_rank(recipe: Recipe) -> bool:
    return isinstance(recipe, Shard | OnFirstRank) or any(map(_differs_by_rank, _sources(recipe)))


def _sources(recipe: Recipe) -> tuple[Recipe, ...]:
    if isinstance(recipe, OfMany):
        return recipe.sources
    return (recipe.source,) if isinstance(recipe, OfOne) else ()
