"""Steps of the step ABI for a batch of sequences: who gets which page, and what each array holds.

`Stepper` plays the runtime: it gives sequences pages (in order or scrambled), turns chunks of
tokens into step inputs, runs them and keeps the pools. It drives anything that maps step inputs to
outputs: the reference evaluator or a compiled engine.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.support.caches import new_pools, outputs_as_inputs
from trtc.builder.recipes import Array
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import Limits
from trtc.protos.step import group_input

STALE = 37.0
"""What a pool holds before it is written: nobody may read it."""

_GONE = 0
"""No sequence owns this page where there are windows; nobody may read it."""
Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]


class Pages:
    """A pool's pages and the sequences that own them."""

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        scramble: int | None = None,
        limits: Limits | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self._page_size = page_size
        self._windows = windows or (None,)
        self._limits = limits
        has_windows = any(window is not None for window in self._windows)
        self._free = list(range(int(has_windows), num_pages))
        if scramble is not None:
            random.Random(scramble).shuffle(self._free)
        self._owned: dict[str, list[list[int]]] = {}
        """Of each group of the cache layout."""
        self._lengths: dict[str, int] = {}

    def restart(self, name: str) -> None:
        """Forget a sequence's tokens; without windows it keeps its pages."""
        self._lengths[name] = 0
        if any(window is not None for window in self._windows):
            pages = [page for group in self._owned.pop(name) for page in group if page != _GONE]
            self._free = [*pages, *self._free]

    def step(
        self,
        chunks: Mapping[str, Sequence[int]],
        *,
        all_logits: bool = True,
        length: int | None = None,
    ) -> dict[str, NDArray[np.int32]]:
        """Append each sequence's chunk and return the step inputs, in the order given.

        Logits are asked for every row, or for each sequence's last one. `length`: what the
        sequences will have, if later steps bring more of a prompt.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in self._windows]
        starts = [0]
        for name, chunk in chunks.items():
            begin = self._lengths.get(name, 0)
            self._grow(name, begin + len(chunk))
            rotary = self._position_offset(length or begin + len(chunk))
            for position in range(begin, begin + len(chunk)):
                page, offset = divmod(position, self._page_size)
                for group, pages in enumerate(self._owned[name]):
                    slots[group].append(pages[page] * self._page_size + offset)
                positions.append(position + rotary)
            tokens += chunk
            starts.append(len(tokens))
        rows = range(len(tokens)) if all_logits else [start - 1 for start in starts[1:]]
        arrays: dict[str, Sequence[int] | list[list[int]]] = {
            "token_ids": tokens,
            "positions": positions,
            "query_start": starts,
            "context_lens": [self._lengths[name] for name in chunks],
            "logit_rows": rows,
        }
        for group in range(len(self._windows)):
            arrays[group_input("slots", group)] = slots[group]
            arrays[group_input("page_table", group)] = self._table(chunks, group)
        return {name: np.asarray(values, dtype=np.int32) for name, values in arrays.items()}

    def _table(self, names: Iterable[str], group: int) -> list[list[int]]:
        rows = [self._owned[name][group] for name in names]
        width = max(len(row) for row in rows)
        return [row + [0] * (width - len(row)) for row in rows]

    def _position_offset(self, length: int) -> int:
        return self._limits.position_offset(length) if self._limits is not None else 0

    def _grow(self, name: str, length: int) -> None:
        owned = self._owned.setdefault(name, [[] for _ in self._windows])
        for pages, window in zip(owned, self._windows, strict=True):
            if window is not None:
                # A state is that after the token before.
                first = self._lengths.get(name, 0) - (window - 1 if window else 1)
                self._release_before(pages, first // self._page_size)
            while len(pages) * self._page_size < length:
                pages.append(self._free.pop(0))
        self._lengths[name] = length

    def _release_before(self, pages: list[int], end: int) -> None:
        """Give what a window has left to others at once, page 0 in the table in its place."""
        for index in range(max(0, end)):
            if pages[index] != _GONE:
                self._free.insert(0, pages[index])
                pages[index] = _GONE


class Stepper:
    """Runs chunks of several sequences against one pool."""

    def __init__(
        self,
        run: Run,
        kv: CacheLayout,
        num_pages: int = 64,
        scramble: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._run = run
        self._limits = limits
        self._pages = Pages(kv.page_size, num_pages, scramble, limits, kv.windows)
        self.pools = new_pools(kv, num_pages, STALE)

    def step(
        self,
        chunks: Mapping[str, Sequence[int]],
        *,
        all_logits: bool = True,
        length: int | None = None,
    ) -> dict[str, NDArray[np.float32]]:
        """Logits of each sequence's chunk, [its length (or 1), vocab]; for `length` see Pages."""
        step = self._pages.step(chunks, all_logits=all_logits, length=length)
        inputs: dict[str, Array] = dict(step)
        starts = inputs["query_start"] if all_logits else np.arange(len(chunks) + 1)
        outputs = self._run(inputs | self.pools)
        self.pools = outputs_as_inputs(self.pools, outputs)
        logits = outputs["logits"]
        return {
            name: logits[begin:end]
            for name, begin, end in zip(chunks, starts[:-1], starts[1:], strict=True)
        }

    def prefill(self, prompt: Sequence[int], chunk: int, name: str = "a") -> NDArray[np.float32]:
        """Logits [len(prompt), vocab] of one sequence, `chunk` tokens a step."""
        pieces = [
            self.step({name: prompt[begin : begin + chunk]}, length=len(prompt))[name]
            for begin in range(0, len(prompt), chunk)
        ]
        return np.concatenate(pieces)

    def greedy(
        self, prompt: Sequence[int], n: int, chunk: int = 1 << 30, name: str = "a"
    ) -> list[int]:
        """The `n` most likely tokens after `prompt`, one by one."""
        return self.greedy_together({name: prompt}, n, chunk)[name]

    def greedy_together(
        self, prompts: Mapping[str, Sequence[int]], n: int, chunk: int = 1 << 30
    ) -> dict[str, list[int]]:
        """As `greedy`, of several sequences that decode in the same steps."""
        found = {
            name: [int(self.prefill(prompt, chunk, name)[-1].argmax())]
            for name, prompt in prompts.items()
        }
        for _ in range(1, n):
            logits: dict[str, NDArray[np.float32]] = {}
            for name, prompt in prompts.items():
                if self._is_switched(len(prompt) + len(found[name])):
                    self._pages.restart(name)
                    logits[name] = self.prefill([*prompt, *found[name]], chunk, name)
            decoding = {name: [own[-1]] for name, own in found.items() if name not in logits}
            logits |= self.step(decoding) if decoding else {}
            for name, own in found.items():
                own.append(int(logits[name][-1].argmax()))
        return found

    def _is_switched(self, length: int) -> bool:
        """Whether the token that makes a sequence this long changes the rows of its positions."""
        limits = self._limits
        return limits is not None and (
            limits.position_offset(length) != limits.position_offset(length - 1)
        )
