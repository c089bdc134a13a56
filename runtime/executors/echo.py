"""A fake executor without model or device, which checks its inputs exactly.

Its "KV" of a token is the token and its position, written to `slots`. A row's logits are a pseudo-
random function of the whole visible context, read back through the page table. So a wrong slot,
page, copy or position gives wrong tokens, and equal contexts give equal logits whatever else is in
the batch. A state is the same function of all tokens so far, computed token by token from the state
in the previous page.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import EnvironmentFault
from trtc.protos.kv import (
    CacheLayout,
    Full,
    Group,
    State,
    Window,
    attention_entry,
    convolution_entry,
)
from trtc.protos.manifest import Limits
from trtc.runtime.executors.base import (
    Bytes,
    DraftRows,
    Float32s,
    Int32s,
    Landed,
    PageRead,
    PendingStep,
    StepBatch,
    UndrawnStep,
)
from trtc.runtime.sampling.sampler import (
    NO_DRAFT,
    Bools,
    SampledTokens,
    SamplingBatch,
    sample,
)

UInt64s = NDArray[np.uint64]

_UNWRITTEN = -1
_POISON = 12345
"""Added to vocab_size: a token id that does not exist."""
_SPREAD = 8.0
"""Logits are in [0, _SPREAD)."""
_DRAFT_ROWS = DraftRows(most=16, as_sequences=False)


@dataclass(frozen=True)
class EchoOptions:
    vocab_size: int = 512
    num_pages: int = 256
    page_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    """Window of each group of the cache layout: see CacheLayout."""
    max_batch_size: int = 64
    max_seq_len: int = 1024
    max_num_tokens: int = 256
    never: tuple[int, ...] = ()
    """Tokens that are never likely, such as the end of sequence: their logits are -1000."""
    draft_rows: DraftRows | None = _DRAFT_ROWS
    """See Executor."""
    counts_pending: bool = False
    """See Executor; may be true only if it runs ahead."""
    accepts_at_random: bool = False
    """Whether a random number of the correct drafts is accepted, instead of all."""
    rope_switch: int | None = None
    """See Limits.rope_switch."""
    step_s: float = 0.0
    """Seconds that a step takes."""
    fail_at_step: int | None = None
    """The step (from 0) whose `wait` raises EnvironmentFault."""


@dataclass(frozen=True)
class EchoStep:
    """A step that was computed at its launch, and completes later."""

    tokens: SampledTokens
    due: float
    failed: bool

    def wait(self) -> SampledTokens:
        time.sleep(max(0.0, self.due - time.monotonic()))
        if self.failed:
            raise EnvironmentFault("the echo device was asked to fail", field="fail_at_step")
        return self.tokens


@dataclass(frozen=True, eq=False)
class EchoForward:
    """A step that is not drawn yet (implements UndrawnStep)."""

    logits: Float32s
    due: float
    failed: bool
    chance: np.random.Generator | None
    """Draws how many correct drafts are accepted; None: all are."""

    def draw(self, sampling: SamplingBatch) -> EchoStep:
        tokens = sample(self.logits, sampling)
        if self.chance is not None and tokens.counts is not None and sampling.drafts is not None:
            some = _some_of(tokens.counts, sampling.drafts, self.chance)
            tokens = tokens._replace(counts=some)
        return EchoStep(tokens, self.due, self.failed)


def _some_of(counts: Bools, drafts: Int32s, chance: np.random.Generator) -> Bools:
    """[R] of each sequence's rows that count, a random number of the first ones."""
    some = counts.copy()
    first = 0
    for last in np.flatnonzero(drafts == NO_DRAFT).tolist():
        if last > first:
            number = chance.integers(0, int(counts[first : last + 1].sum()) + 1)
            some[first + number : last + 1] = False
        first = last + 1
    return some


class EchoExecutor:
    """See the module."""

    def __init__(self, options: EchoOptions | None = None) -> None:
        self.options = options or EchoOptions()
        shape = (self.options.num_pages * self.options.page_size,)
        self._tokens = np.full(shape, _UNWRITTEN, np.int64)
        self._positions = np.full(shape, _UNWRITTEN, np.int64)
        self._states = np.zeros(self.options.num_pages, np.uint64)
        """State in each page of a state group."""
        self._state_positions = np.full(self.options.num_pages, _UNWRITTEN, np.int64)
        """Position of the last token of each state."""
        self._vocabulary = mix(np.arange(self.options.vocab_size, dtype=np.uint64))
        self._chance = np.random.default_rng(0) if self.options.accepts_at_random else None
        self.num_steps = 0
        self.closed = False

    @property
    def limits(self) -> Limits:
        return Limits(
            max_batch_size=self.options.max_batch_size,
            max_seq_len=self.options.max_seq_len,
            max_num_tokens=self.options.max_num_tokens,
            rope_switch=self.options.rope_switch,
        )

    @property
    def kv(self) -> CacheLayout:
        return CacheLayout(
            page_size=self.options.page_size,
            groups=tuple(
                _group(layer, window) for layer, window in enumerate(self.options.windows)
            ),
        )

    @property
    def vocab_size(self) -> int:
        return self.options.vocab_size

    @property
    def runs_ahead(self) -> bool:
        return False

    @property
    def num_pages(self) -> int:
        return self.options.num_pages

    @property
    def counts_pending(self) -> bool:
        return self.options.counts_pending

    @property
    def draft_rows(self) -> DraftRows | None:
        return self.options.draft_rows

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        return self._forward(batch).draw(sampling)

    def launch_forward(self, batch: StepBatch) -> UndrawnStep:
        return self._forward(batch)

    def _forward(self, batch: StepBatch) -> EchoForward:
        failed = self.num_steps == self.options.fail_at_step
        logits = self.logits(batch)
        self.num_steps += 1
        return EchoForward(logits, time.monotonic() + self.options.step_s, failed, self._chance)

    def logits(self, batch: StepBatch) -> Float32s:
        self._check(batch)
        groups = len(self.options.windows)
        self._tokens[batch.slots] = np.tile(batch.token_ids, groups)
        self._positions[batch.slots] = np.tile(batch.positions, groups)
        rows = self._advance_states(batch)
        sequences = np.searchsorted(batch.query_start, batch.logit_rows, side="right") - 1
        states = [
            self._read_state(batch, int(sequence), int(row), rows)
            for sequence, row in zip(sequences, batch.logit_rows, strict=True)
        ]
        return self._logits_of(np.array(states, np.uint64))

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        size = self.options.page_size
        for source, target in zip(sources, targets, strict=True):
            self._states[target] = self._states[source]
            self._state_positions[target] = self._state_positions[source]
            for pool in (self._tokens, self._positions):
                pool[target * size : (target + 1) * size] = pool[
                    source * size : (source + 1) * size
                ]

    @property
    def moves_pages(self) -> bool:
        return True

    @property
    def keeps_weights(self) -> bool:
        return True

    def weights_on_host(self) -> Bytes:
        return np.empty(0, np.uint8)

    def read_pages(self, pages: Sequence[int]) -> PageRead:
        data = np.zeros((len(pages), self.kv.page_bytes), np.uint8)
        for row, page in zip(data, pages, strict=True):
            begin = 0
            for part in self._parts(page, len(row)):
                row[begin : begin + part.nbytes] = part.view(np.uint8)
                begin += part.nbytes
        return Landed(data)

    def write_pages(self, pages: Sequence[int], data: Bytes) -> None:
        for row, page in zip(data, pages, strict=True):
            begin = 0
            for part in self._parts(page, len(row)):
                part.view(np.uint8)[:] = row[begin : begin + part.nbytes]
                begin += part.nbytes

    def _parts(self, page: int, num_bytes: int) -> list[NDArray[Any]]:
        """The contents of a page as arrays of 8-byte numbers. If all groups are states, a page has
        no room for tokens, and none are read."""
        size = self.options.page_size
        parts: list[NDArray[Any]] = [
            *(pool[page : page + 1] for pool in (self._states, self._state_positions)),
            *(pool[page * size : (page + 1) * size] for pool in (self._tokens, self._positions)),
        ]
        return parts if sum(part.nbytes for part in parts) <= num_bytes else parts[:2]

    def check(self) -> None:
        """Nothing to check."""

    def close(self) -> None:
        self.closed = True

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Greedy decoding of a prompt, computed without pages, batches or chunks."""
        token_ids = list(prompt_ids)
        for _ in range(max_tokens):
            known = np.array(token_ids, np.int64)
            states = [context_state(known, window) for window in self.options.windows]
            state = np.bitwise_xor.reduce(_by_group(states))
            token_ids.append(int(self._logits_of(np.array([state], np.uint64)).argmax()))
        return tuple(token_ids[len(prompt_ids) :])

    def _check(self, batch: StepBatch) -> None:
        options = self.options
        assert not self.closed, "the executor is closed"
        assert len(batch.slots) == len(self.options.windows) * len(batch.token_ids)
        assert len(batch.token_ids) == batch.query_start[-1] <= options.max_num_tokens
        drafts = options.draft_rows
        most_rows = max(options.max_batch_size, drafts.most if drafts else 0)
        as_sequences = drafts is not None and drafts.as_sequences
        assert len(batch.context_lens) <= (most_rows if as_sequences else options.max_batch_size)
        assert len(batch.logit_rows) <= most_rows
        assert (np.diff(batch.logit_rows) >= 0).all(), "logit rows are not in order"
        assert len(np.unique(batch.slots)) == len(batch.slots), "two tokens in one slot"
        assert batch.context_lens.max() <= options.max_seq_len
        assert 0 <= batch.token_ids.min() <= batch.token_ids.max() < options.vocab_size

    def _advance_states(self, batch: StepBatch) -> UInt64s:
        """Write the state group's pages of this step; returns the state after each token [T].

        Sequences are computed in order, so that one may start from the state that the one before it
        has written."""
        size, after = self.options.page_size, np.zeros(len(batch.token_ids), np.uint64)
        if 0 not in self.options.windows:
            return after
        groups, group = len(self.options.windows), self.options.windows.index(0)
        tables = batch.page_table.reshape(groups, len(batch.context_lens), -1)
        targets = batch.slots.reshape(groups, -1)[group] // size
        for sequence, pages in enumerate(tables[group]):
            begin, end = batch.query_start[sequence], batch.query_start[sequence + 1]
            start = int(batch.context_lens[sequence] - (end - begin))
            state = np.uint64(0)
            if start:
                page = pages[(start - 1) // size]
                found = self._state_positions[page] == batch.positions[begin] - 1
                state = self._states[page] if found else np.uint64(_POISON)
            at = np.arange(start, start + end - begin)
            hashes = _token_hashes(at, batch.token_ids[begin:end])
            after[begin:end] = state ^ np.bitwise_xor.accumulate(hashes)
            # Of the tokens of a page, the last one's state remains.
            self._states[targets[begin:end]] = after[begin:end]
            self._state_positions[targets[begin:end]] = batch.positions[begin:end]
        return after

    def _read_state(self, batch: StepBatch, sequence: int, row: int, rows: UInt64s) -> np.uint64:
        """State of the context up to a row's token, as this sequence's page tables find it."""
        after = int(batch.query_start[sequence + 1]) - 1 - row
        at = np.arange(int(batch.context_lens[sequence]) - after)
        tables = batch.page_table.reshape(len(self.options.windows), len(batch.context_lens), -1)
        states = [
            rows[row]
            if window == 0
            else context_state(self._read_tokens(batch, row, at, table[sequence]), window)
            for table, window in zip(tables, self.options.windows, strict=True)
        ]
        state: np.uint64 = np.bitwise_xor.reduce(_by_group(states))
        return state

    def _read_tokens(
        self, batch: StepBatch, row: int, at: NDArray[np.int64], pages: Int32s
    ) -> NDArray[np.int64]:
        """Tokens of the positions `at`, as one page table finds them."""
        size = self.options.page_size
        slots = pages[at // size].astype(np.int64) * size + at % size
        # A whole context is rotated by one set of rotary factors: the long ones if it is too long
        # for the short ones.
        offset = int(batch.positions[row]) - int(at[-1])
        long_enough = offset >= self.limits.position_offset(len(at))
        found = (self._positions[slots] == at + offset) & long_enough
        # A slot with another position, or with nothing, reads as a token id that does not exist.
        return np.where(found, self._tokens[slots], self.vocab_size + _POISON)

    def _logits_of(self, states: UInt64s) -> Float32s:
        mixed = mix(states[:, None] ^ self._vocabulary)
        logits = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(_SPREAD / 2**24)
        logits[:, list(self.options.never)] = -1000.0
        return logits


def context_state(token_ids: NDArray[np.int64], window: int | None = None) -> np.uint64:
    """An order-dependent hash of a context's last `window` tokens, or of all."""
    hashes = _token_hashes(np.arange(len(token_ids)), token_ids)
    state: np.uint64 = np.bitwise_xor.reduce(hashes[-window:] if window else hashes)
    return state


def _token_hashes(positions: NDArray[np.int64], token_ids: NDArray[Any]) -> UInt64s:
    return mix(mix(positions.astype(np.uint64)) + token_ids.astype(np.uint64))


def _group(layer: int, window: int | None) -> Group:
    if window == 0:
        entry = convolution_entry(layer, num_columns=2, width=4, dtype="f32")
        return Group(kind=State(), entries=(entry,))
    entry = attention_entry(layer, num_kv_heads=1, head_dim=4, dtype="f32")
    return Group(kind=Full() if window is None else Window(tokens=window), entries=(entry,))


def _by_group(states: Sequence[np.uint64]) -> UInt64s:
    """The states of all groups, mixed with the group's index so that they differ."""
    return np.array([states[0], *(mix(np.array(states[1:], np.uint64)))], np.uint64)


def mix(values: UInt64s) -> UInt64s:
    """The finaliser of SplitMix64 (Steele et al., 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
