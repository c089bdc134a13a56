"""Weights by recipe: where a graph initialiser's bytes come from, as data.

The graph names tensors and never holds them: a 70B graph is built in seconds. A recipe is read
when its tensor is written into the engine, one tensor at a time, so the builder's memory stays
near the size of the largest tensor. Passes that merge or split weights compose recipes.

Arrays are numpy with ml_dtypes' element types (bfloat16, float8_e4m3fn, int4, uint4).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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
class Apply:
    """A pure function of tensors: unpacking, dequantising, casting, packing for a kernel."""

    function: Callable[..., Array]
    sources: tuple[Recipe, ...]

    def load(self, reader: TensorReader) -> Array:
        return self.function(*(source.load(reader) for source in self.sources))
