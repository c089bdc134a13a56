"""Calls of short_conv, for the kernel tests of every target."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.support.kernels import KernelCall
from tests.support.operands import Array, random_array
from trtc.plugins.registry import REGISTRY

PAGE_SIZE = 8
TABLE_WIDTH = 1024 // PAGE_SIZE
"""Of lowered calls in tests (support/lowered.py)."""
STEP = ((5, 5), (9, 1), (17, 1), (30, 13), (16, 8), (40, 24))
"""(context, new tokens): from the start, within a page, after one, across several, whole pages."""
MOST_DRAFTS = 4
SHAPES = (("f32", 96, 2, False), ("bf16", 72, 2, True), ("bf16", 128, 3, False))
"""Element type, channels, columns of the state, bias."""


class Sequences:
    """Whole histories, of which any part may be a step's new tokens."""

    def __init__(self, dtype: str, channels: int, columns: int, bias: bool) -> None:
        rng = np.random.default_rng(channels)
        self.dtype, self.channels, self.columns = dtype, channels, columns
        self.gated = [
            random_array(rng, context, 3 * channels, dtype=dtype, spread=2) for context, _ in STEP
        ]
        self.weights: dict[str, Array | None] = {
            "weight": random_array(rng, columns + 1, channels),
            "bias": random_array(rng, channels) if bias else None,
        }
        widths = [-(-context // PAGE_SIZE) for context, _ in STEP]
        num_drafted = len(STEP) * (1 + MOST_DRAFTS)
        pages = rng.permutation(sum(widths) + num_drafted + 2).astype(np.int32)
        self.table = np.zeros((len(STEP), TABLE_WIDTH), np.int32)
        for row, width in enumerate(widths):
            self.table[row, :width], pages = pages[:width], pages[width:]
        self.draft_pages = pages[:num_drafted].reshape(len(STEP), -1)
        """Where rows with drafts leave their states, each in one of its own."""
        self.num_pages = sum(widths) + num_drafted + 2

    def call(self, parts: list[tuple[int, int, int]], state: Array | None = None) -> KernelCall:
        """A step over (sequence, begin, end) triples."""
        if state is None:
            shape = (self.num_pages, self.columns, self.channels)
            state = np.full(shape, np.nan, self.gated[0].dtype)
        counts = [end - begin for _, begin, end in parts]
        inputs: dict[str, Any] = {
            "gated": np.concatenate([self.gated[one][begin:end] for one, begin, end in parts]),
            "state": state,
            "query_start": np.cumsum([0, *counts]).astype(np.int32),
            "context_lens": np.array([end for *_, end in parts], np.int32),
            "page_table": self.table[[one for one, *_ in parts]],
            "slots": np.concatenate([self.slots(*part) for part in parts]),
            **self.weights,
        }
        return KernelCall(REGISTRY["short_conv"], {"page_size": PAGE_SIZE}, inputs)

    def slots(self, sequence: int, begin: int, end: int) -> Array:
        """Where each token of a part leaves its state."""
        page, offset = np.divmod(np.arange(begin, end), PAGE_SIZE)
        slots: Array = self.table[sequence, page] * PAGE_SIZE + offset.astype(np.int32)
        return slots

    def history(self) -> list[tuple[int, int, int]]:
        """What came before STEP."""
        parts = [(one, 0, context - new) for one, (context, new) in enumerate(STEP)]
        return [part for part in parts if part[2]]

    def decode(self) -> list[tuple[int, int, int]]:
        """One token each, after the history; sequences that begin are left out."""
        return [(one, begin, begin + 1) for one, _, begin in self.history()]

    def drafted(self) -> list[tuple[int, int, int]]:
        """One token each, after the history, and from none to MOST_DRAFTS drafts."""
        return [
            (one, begin, min(begin + 1 + number % (1 + MOST_DRAFTS), STEP[one][0]))
            for number, (one, _, begin) in enumerate(self.history(), start=1)
        ]

    def drafted_call(self, state: Array, *, as_sequences: bool) -> KernelCall:
        """A step over `drafted`.

        Args:
            as_sequences: each draft is a sequence of its own, which goes on from the row before.
        """
        parts = self.drafted()
        slots = [
            self.draft_pages[one, : end - begin] * PAGE_SIZE + np.arange(begin, end) % PAGE_SIZE
            for one, begin, end in parts
        ]
        given = {"slots": np.concatenate(slots).astype(np.int32)}
        if as_sequences:
            parts = [(one, at, at + 1) for one, begin, end in parts for at in range(begin, end)]
            given["page_table"] = self.table[[one for one, *_ in parts]]
            for row, (one, at, _) in enumerate(parts):
                if row and parts[row - 1][0] == one:
                    page = given["slots"][row - 1] // PAGE_SIZE
                    given["page_table"][row, (at - 1) // PAGE_SIZE] = page
        plain = self.call(parts, state)
        return replace(plain, inputs={**plain.inputs, **given})

    def kept_call(self, parts: list[tuple[int, int, int]], state: Array) -> KernelCall:
        """A step over `parts` in which the last row of each leaves its state in a page of its own,
        so that the one before it stays."""
        plain = self.call(parts, state)
        slots, starts = plain.inputs["slots"], plain.inputs["query_start"]
        assert slots is not None
        assert starts is not None
        for (one, _, end), last in zip(parts, starts[1:] - 1, strict=True):
            slots[last] = self.draft_pages[one, 0] * PAGE_SIZE + (end - 1) % PAGE_SIZE
        return plain

    def step(self) -> list[tuple[int, int, int]]:
        return [(one, context - new, context) for one, (context, new) in enumerate(STEP)]

    def torch_outputs(self, number: int) -> Array:
        """A whole sequence at once, by torch's convolution."""
        b, c, x = torch.tensor(self.gated[number].astype(np.float32)).chunk(3, dim=1)
        weight, bias = self.weights["weight"], self.weights["bias"]
        assert weight is not None
        mixed = F.conv1d(
            (b * x).T[None],
            torch.tensor(weight.T[:, None, :].copy()),
            None if bias is None else torch.tensor(bias),
            padding=self.columns,
            groups=self.channels,
        )
        outputs: Array = (c * mixed[0, :, : len(b)].T).numpy()
        return outputs


def cases() -> list[Sequences]:
    return [Sequences(*shape) for shape in SHAPES]
