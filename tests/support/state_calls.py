"""Calls of operators with states, for the kernel tests of every target."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.kernels import KernelCall
from tests.support.operands import Array
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import NUMPY_DTYPES

PAGE_SIZE = 8
MAX_SEQ_LEN = 1024
"""Of lowered calls in tests (support/lowered.py)."""
STEP = ((5, 5), (9, 1), (17, 1), (30, 13), (16, 8), (40, 24))
"""(context, new tokens): from the start, within a page, after one, across several, whole pages."""
LONG = ((70, 70), (150, 83), (64, 64), (129, 1), (200, 137))
"""As STEP, of chunks of up to 64 tokens."""
MOST_DRAFTS = 4
Lengths = tuple[tuple[int, int], ...]
Part = tuple[int, int, int]
"""(sequence, begin, end) of its tokens."""


class Sequences:
    """Whole histories, of which any part may be a step's new tokens."""

    def __init__(
        self,
        op: str,
        rows: Sequence[Mapping[str, Array]],
        weights: Mapping[str, Array | None],
        state: tuple[tuple[int, ...], str],
        *,
        attributes: Mapping[str, int | float | str] | None = None,
        page_size: int = PAGE_SIZE,
        seed: int = 0,
        lengths: Lengths = STEP,
    ) -> None:
        """
        Args:
            rows: of each history, the inputs that have a row for each token.
            state: shape of a page's state, and its element type.
            attributes: all but page_size.
            lengths: of each history, as STEP's.
        """
        self.op, self.rows, self.weights = op, rows, weights
        self.page_size, self.lengths = page_size, lengths
        self.attributes = {**(attributes or {}), "page_size": page_size}
        self._state = state
        widths = [-(-context // page_size) for context, _ in lengths]
        num_drafted = len(lengths) * (1 + MOST_DRAFTS)
        rng = np.random.default_rng(seed)
        pages = rng.permutation(sum(widths) + num_drafted + 2).astype(np.int32)
        self.table = np.zeros((len(lengths), MAX_SEQ_LEN // page_size), np.int32)
        for row, width in enumerate(widths):
            self.table[row, :width], pages = pages[:width], pages[width:]
        self.draft_pages = pages[:num_drafted].reshape(len(lengths), -1)
        """Where rows with drafts leave their states, each in one of its own."""
        self.num_pages = sum(widths) + num_drafted + 2

    def call(self, parts: list[Part], state: Array | None = None) -> KernelCall:
        """A step over (sequence, begin, end) triples."""
        if state is None:
            shape, dtype = self._state
            state = np.full((self.num_pages, *shape), np.nan, NUMPY_DTYPES[dtype])
        counts = [end - begin for _, begin, end in parts]
        inputs: dict[str, Any] = {
            **{
                name: np.concatenate([self.rows[one][name][begin:end] for one, begin, end in parts])
                for name in self.rows[0]
            },
            "state": state,
            "query_start": np.cumsum([0, *counts]).astype(np.int32),
            "context_lens": np.array([end for *_, end in parts], np.int32),
            "page_table": self.table[[one for one, *_ in parts]],
            "slots": np.concatenate([self.slots(*part) for part in parts]),
            **self.weights,
        }
        return KernelCall(REGISTRY[self.op], self.attributes, inputs)

    def slots(self, sequence: int, begin: int, end: int) -> Array:
        """Where each token of a part leaves its state."""
        page, offset = np.divmod(np.arange(begin, end), self.page_size)
        slots: Array = self.table[sequence, page] * self.page_size + offset.astype(np.int32)
        return slots

    def history(self) -> list[Part]:
        """What came before the step."""
        parts = [(one, 0, context - new) for one, (context, new) in enumerate(self.lengths)]
        return [part for part in parts if part[2]]

    def decode(self) -> list[Part]:
        """One token each, after the history; sequences that begin are left out."""
        return [(one, begin, begin + 1) for one, _, begin in self.history()]

    def drafted(self) -> list[Part]:
        """One token each, after the history, and from none to MOST_DRAFTS drafts."""
        return [
            (one, begin, min(begin + 1 + number % (1 + MOST_DRAFTS), self.lengths[one][0]))
            for number, (one, _, begin) in enumerate(self.history(), start=1)
        ]

    def drafted_call(self, state: Array, *, as_sequences: bool) -> KernelCall:
        """A step over `drafted`.

        Args:
            as_sequences: each draft is a sequence of its own, which goes on from the row before.
        """
        parts = self.drafted()
        slots = [
            self.draft_pages[one, : end - begin] * self.page_size
            + np.arange(begin, end) % self.page_size
            for one, begin, end in parts
        ]
        given = {"slots": np.concatenate(slots).astype(np.int32)}
        if as_sequences:
            parts = [(one, at, at + 1) for one, begin, end in parts for at in range(begin, end)]
            given["page_table"] = self.table[[one for one, *_ in parts]]
            for row, (one, at, _) in enumerate(parts):
                if row and parts[row - 1][0] == one:
                    page = given["slots"][row - 1] // self.page_size
                    given["page_table"][row, (at - 1) // self.page_size] = page
        plain = self.call(parts, state)
        return replace(plain, inputs={**plain.inputs, **given})

    def kept_call(self, parts: list[Part], state: Array) -> KernelCall:
        """A step over `parts` in which the last row of each leaves its state in a page of its own,
        so that the one before it stays."""
        plain = self.call(parts, state)
        slots, starts = plain.inputs["slots"], plain.inputs["query_start"]
        assert slots is not None
        assert starts is not None
        for (one, _, end), last in zip(parts, starts[1:] - 1, strict=True):
            slots[last] = self.draft_pages[one, 0] * self.page_size + (end - 1) % self.page_size
        return plain

    def step(self) -> list[Part]:
        return [(one, context - new, context) for one, (context, new) in enumerate(self.lengths)]
