"""Steps of the step ABI for a batch of sequences: who gets which page, and what each array holds.

`Stepper` plays the runtime: it gives sequences pages (in order or scrambled), turns chunks of
tokens into step inputs, runs them and keeps the pools. It drives anything that maps step inputs to
outputs: the reference evaluator or a compiled engine.
"""

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trtc.builder.recipes import Array
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.manifest import KvGeometry

STALE = 37.0
"""What a pool holds before it is written: nobody may read it."""

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]


class Pages:
    """A pool's pages and the sequences that own them."""

    def __init__(self, page_size: int, num_pages: int, scramble: int | None = None) -> None:
        self._page_size = page_size
        self._free = list(range(num_pages))
        if scramble is not None:
            random.Random(scramble).shuffle(self._free)
        self._owned: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(
        self, chunks: Mapping[str, Sequence[int]], *, all_logits: bool = True
    ) -> dict[str, NDArray[np.int32]]:
        """Append each sequence's chunk and return the step inputs, in the order given.

        Logits are asked for every row, or for each sequence's last one.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, chunk in chunks.items():
            begin = self._lengths.get(name, 0)
            self._grow(name, begin + len(chunk))
            pages = self._owned[name]
            for position in range(begin, begin + len(chunk)):
                page, offset = divmod(position, self._page_size)
                slots.append(pages[page] * self._page_size + offset)
                positions.append(position)
            tokens += chunk
            starts.append(len(tokens))
        width = max(len(self._owned[name]) for name in chunks)
        table = [self._owned[name] + [0] * (width - len(self._owned[name])) for name in chunks]
        rows = range(len(tokens)) if all_logits else [start - 1 for start in starts[1:]]
        arrays: dict[str, Sequence[int] | list[list[int]]] = {
            "token_ids": tokens,
            "positions": positions,
            "slots": slots,
            "query_start": starts,
            "context_lens": [self._lengths[name] for name in chunks],
            "page_table": table,
            "logit_rows": rows,
        }
        return {name: np.asarray(values, dtype=np.int32) for name, values in arrays.items()}

    def _grow(self, name: str, length: int) -> None:
        owned = self._owned.setdefault(name, [])
        while len(owned) * self._page_size < length:
            owned.append(self._free.pop(0))
        self._lengths[name] = length


class Stepper:
    """Runs chunks of several sequences against one pool."""

    def __init__(
        self, run: Run, kv: KvGeometry, num_pages: int = 64, scramble: int | None = None
    ) -> None:
        self._run = run
        self._pages = Pages(kv.page_size, num_pages, scramble)
        shape = (num_pages, 2, kv.page_size, kv.num_kv_heads, kv.head_dim)
        self.pools: list[Array] = [
            np.full(shape, STALE, dtype=np.float32).astype(NUMPY_DTYPES[kv.dtype])
            for _ in range(kv.num_layers)
        ]

    def step(
        self, chunks: Mapping[str, Sequence[int]], *, all_logits: bool = True
    ) -> dict[str, NDArray[np.float32]]:
        """Logits of each sequence's chunk, [its length (or 1), vocab]."""
        inputs: dict[str, Array] = dict(self._pages.step(chunks, all_logits=all_logits))
        starts = inputs["query_start"] if all_logits else np.arange(len(chunks) + 1)
        inputs |= {f"kv_{index}": pool for index, pool in enumerate(self.pools)}
        outputs = self._run(inputs)
        self.pools = [outputs[f"kv_{index}_out"] for index in range(len(self.pools))]
        logits = outputs["logits"]
        return {
            name: logits[begin:end]
            for name, begin, end in zip(chunks, starts[:-1], starts[1:], strict=True)
        }

    def prefill(self, prompt: Sequence[int], chunk: int, name: str = "a") -> NDArray[np.float32]:
        """Logits [len(prompt), vocab] of one sequence, `chunk` tokens a step."""
        pieces = [
            self.step({name: prompt[begin : begin + chunk]})[name]
            for begin in range(0, len(prompt), chunk)
        ]
        return np.concatenate(pieces)

    def greedy(
        self, prompt: Sequence[int], n: int, chunk: int = 1 << 30, name: str = "a"
    ) -> list[int]:
        """The `n` most likely tokens after `prompt`, one by one."""
        found = [int(self.prefill(prompt, chunk, name)[-1].argmax())]
        while len(found) < n:
            found.append(int(self.step({name: [found[-1]]})[name][-1].argmax()))
        return found
