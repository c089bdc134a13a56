"""All ranks of a sharded model in one process: their graphs in threads that meet at collectives."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from trtc.builder.evaluator import Evaluator, Exchange
from trtc.builder.module import Module
from trtc.builder.recipes import Array, TensorReader, recipe_of_rank
from trtc.protos.kv import Place

_PATIENCE_S = 60.0


def module_of_rank(module: Module, rank: int) -> Module:
    """What rank `rank` runs, of a sharded module."""
    recipes = {name: recipe_of_rank(recipe, rank) for name, recipe in module.recipes.items()}
    return replace(module, recipes=recipes)


class Meeting:
    """Where the ranks of one model exchange what they have."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=_PATIENCE_S)
        self._given: list[tuple[str, Array] | None] = [None] * ranks

    def exchange_of(self, rank: int) -> Exchange:
        def exchange(node: str, given: Array) -> tuple[Array, ...]:
            self._given[rank] = (node, given)
            self._barrier.wait()
            everyone = [one for one in self._given if one is not None]
            self._barrier.wait()
            assert {name for name, _ in everyone} == {node}, "ranks met at different collectives"
            return tuple(array for _, array in everyone)

        return exchange

    def leave(self) -> None:
        """Let nobody wait for a rank that has failed."""
        self._barrier.abort()


def _shared_axis(place: Place) -> int | None:
    """Of a pool, the axis that ranks share; None: each has the whole.

    A convolution's columns are joined rank by rank, which is not their order in the whole model.
    """
    plane = place.entry.planes[0]
    if plane.name == "latent":
        return None
    if plane.name == "columns" or (plane.name == "matrix" and plane.heads == 1):
        return 2
    return 1 if plane.name == "matrix" else 3


class ShardedRun:
    """Runs every rank of a sharded module, and looks from outside like the whole model: pools are
    split and joined by KV heads, states by heads or channels."""

    def __init__(self, module: Module, reader: TensorReader, ranks: int) -> None:
        self._meeting = Meeting(ranks)
        self._axes = {place.name: _shared_axis(place) for place in module.kv.places}
        self._evaluators = [
            Evaluator(module_of_rank(module, rank), reader, self._meeting.exchange_of(rank))
            for rank in range(ranks)
        ]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        ranks = len(self._evaluators)
        with ThreadPoolExecutor(ranks) as pool:
            outputs = list(pool.map(self._run, range(ranks), [inputs] * ranks))
        first, *others = [output["logits"] for output in outputs]
        for other in others:
            np.testing.assert_array_equal(other, first)
        joined = {
            name: self._joined(name.removesuffix("_out"), [output[name] for output in outputs])
            for name in outputs[0]
            if name != "logits"
        }
        return {"logits": first, **joined}

    def _joined(self, name: str, pools: list[Array]) -> Array:
        axis = self._axes[name]
        if axis is not None:
            return np.concatenate(pools, axis=axis)
        for pool in pools:
            np.testing.assert_array_equal(pool, pools[0])
        return pools[0]

    def _run(self, rank: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
        own = {
            name: np.split(array, len(self._evaluators), axis=axis)[rank]
            if (axis := self._axes.get(name)) is not None
            else array
            for name, array in inputs.items()
        }
        try:
            return self._evaluators[rank].run(own)
        except BaseException:
            self._meeting.leave()
            raise
