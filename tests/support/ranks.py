"""All ranks of a sharded model in one process: their graphs in threads that meet at collectives."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import numpy as np

from trtc.builder.evaluator import Evaluator, Exchange
from trtc.builder.module import Module
from trtc.builder.recipes import Array, TensorReader, recipe_of_rank
from trtc.protos.kv import CacheLayout, Entry

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


def _shared_axis(whole: tuple[int, ...], of_rank: Sequence[int | str]) -> int:
    """Of a pool, the axis that ranks share; any, where each rank has all of it.

    A convolution's columns are joined rank by rank, which is not their order in the whole model.
    """
    axes = range(1, len(whole))
    return next((axis for axis in axes if whole[axis] != of_rank[axis]), 1)


def joined_layout(whole: CacheLayout, of_rank: CacheLayout, ranks: int) -> CacheLayout:
    """The whole model's, but that a convolution has the columns of every rank side by side, even
    those that all of them have."""

    def joined(entry: Entry, own: Entry) -> Entry:
        if own.planes[0].name != "columns":
            return entry
        width = ranks * own.planes[0].width
        planes = (msgspec.structs.replace(plane, width=width) for plane in entry.planes)
        return msgspec.structs.replace(entry, planes=tuple(planes))

    groups = []
    for group, own in zip(whole.groups, of_rank.groups, strict=True):
        entries = map(joined, group.entries, own.entries)
        groups.append(msgspec.structs.replace(group, entries=tuple(entries)))
    return msgspec.structs.replace(whole, groups=tuple(groups))


class ShardedRun:
    """Runs every rank of a sharded module, and looks from outside like the whole model: pools are
    split and joined by KV heads, states by heads or channels (`joined_layout`)."""

    def __init__(self, module: Module, reader: TensorReader, ranks: int) -> None:
        self._meeting = Meeting(ranks)
        self._shapes = {place.name: module.kv.pool_shape(place) for place in module.kv.places}
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
            name: self._joined(
                [output[name] for output in outputs], name.removesuffix("_out"), inputs
            )
            for name in outputs[0]
            if name != "logits"
        }
        return {"logits": first, **joined}

    def _joined(self, pools: list[Array], name: str, inputs: Mapping[str, Array]) -> Array:
        """The pools of all ranks side by side; ranks that share one must have left the same."""
        whole = inputs[name].shape
        axis = _shared_axis(whole, self._shapes[name])
        each = len(pools) * pools[0].shape[axis] // whole[axis]
        for at, pool in enumerate(pools):
            np.testing.assert_array_equal(pool, pools[at // each * each])
        return np.concatenate(pools[::each], axis=axis)

    def _run(self, rank: int, inputs: Mapping[str, Array]) -> dict[str, Array]:
        own = {
            name: self._share(array, name, rank) if name in self._shapes else array
            for name, array in inputs.items()
        }
        try:
            return self._evaluators[rank].run(own)
        except BaseException:
            self._meeting.leave()
            raise

    def _share(self, pool: Array, name: str, rank: int) -> Array:
        axis = _shared_axis(pool.shape, self._shapes[name])
        shares = pool.shape[axis] // int(self._shapes[name][axis])
        return np.split(pool, shares, axis=axis)[rank * shares // len(self._evaluators)]
