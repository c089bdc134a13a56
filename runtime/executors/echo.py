"""A fake executor: no model, no device, exact about what it was given.

Its "KV" of a token is the token and its position, written to `slots`. A row's logits are a pseudo-
random function of the whole visible context, read back through the page table; a wrong slot, page,
copy or position therefore gives wrong tokens, and equal contexts give equal logits whatever else
is in the batch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import EnvironmentFault
from trtc.protos.manifest import KvGeometry, Limits
from trtc.runtime.executors.base import Float32s, PendingStep, StepBatch
from trtc.runtime.sampler import SampledTokens, SamplingBatch, sample

UInt64s = NDArray[np.uint64]

_UNWRITTEN = -1
_POISON = 12345
"""Added to vocab_size: a token id that does not exist."""
_SPREAD = 8.0
"""Logits lie in [0, _SPREAD)."""


@dataclass(frozen=True)
class EchoOptions:
    vocab_size: int = 512
    num_pages: int = 256
    page_size: int = 16
    max_batch_size: int = 64
    max_seq_len: int = 1024
    max_num_tokens: int = 256
    never: tuple[int, ...] = ()
    """Tokens that are never likely, such as the end of sequence: their logits are -1000."""
    step_s: float = 0.0
    """What a step takes."""
    fail_at_step: int | None = None
    """The step (from 0) whose `wait` raises EnvironmentFault."""


@dataclass(frozen=True)
class EchoStep:
    """A step that was computed when it was launched, and is due later."""

    tokens: SampledTokens
    due: float
    failed: bool

    def wait(self) -> SampledTokens:
        time.sleep(max(0.0, self.due - time.monotonic()))
        if self.failed:
            raise EnvironmentFault("the echo device was told to fail", field="fail_at_step")
        return self.tokens


class EchoExecutor:
    """See the module."""

    def __init__(self, options: EchoOptions | None = None) -> None:
        self.options = options or EchoOptions()
        shape = (self.options.num_pages * self.options.page_size,)
        self._tokens = np.full(shape, _UNWRITTEN, np.int64)
        self._positions = np.full(shape, _UNWRITTEN, np.int64)
        self.num_steps = 0
        self.closed = False

    @property
    def limits(self) -> Limits:
        return Limits(
            max_batch_size=self.options.max_batch_size,
            max_seq_len=self.options.max_seq_len,
            max_num_tokens=self.options.max_num_tokens,
        )

    @property
    def kv(self) -> KvGeometry:
        return KvGeometry(
            num_layers=1,
            page_size=self.options.page_size,
            num_kv_heads=1,
            head_dim=4,
            dtype="f32",
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

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        failed = self.num_steps == self.options.fail_at_step
        tokens = sample(self.logits(batch), sampling)
        self.num_steps += 1
        return EchoStep(tokens, time.monotonic() + self.options.step_s, failed)

    def logits(self, batch: StepBatch) -> Float32s:
        self._check(batch)
        self._tokens[batch.slots] = batch.token_ids
        self._positions[batch.slots] = batch.positions
        sequences = np.searchsorted(batch.query_start, batch.logit_rows, side="right") - 1
        states = [
            self._read_state(batch, int(sequence), int(batch.positions[row]))
            for sequence, row in zip(sequences, batch.logit_rows, strict=True)
        ]
        return self._logits_of(np.array(states, np.uint64))

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        size = self.options.page_size
        for source, target in zip(sources, targets, strict=True):
            for pool in (self._tokens, self._positions):
                pool[target * size : (target + 1) * size] = pool[
                    source * size : (source + 1) * size
                ]

    def check(self) -> None:
        """Nothing can have happened."""

    def close(self) -> None:
        self.closed = True

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """What greedy decoding of a prompt gives, computed without pages, batches or chunks."""
        token_ids = list(prompt_ids)
        for _ in range(max_tokens):
            state = context_state(np.array(token_ids, np.int64))
            token_ids.append(int(self._logits_of(np.array([state], np.uint64)).argmax()))
        return tuple(token_ids[len(prompt_ids) :])

    def _check(self, batch: StepBatch) -> None:
        options = self.options
        assert not self.closed, "the executor is closed"
        assert len(batch.token_ids) == batch.query_start[-1] <= options.max_num_tokens
        assert len(batch.context_lens) <= options.max_batch_size
        assert len(np.unique(batch.slots)) == len(batch.slots), "two tokens in one slot"
        assert batch.context_lens.max() <= options.max_seq_len
        assert 0 <= batch.token_ids.min() <= batch.token_ids.max() < options.vocab_size

    def _read_state(self, batch: StepBatch, sequence: int, position: int) -> np.uint64:
        """State of the context up to `position`, as this sequence's page table finds it."""
        size = self.options.page_size
        at = np.arange(position + 1)
        slots = batch.page_table[sequence, at // size].astype(np.int64) * size + at % size
        found = self._positions[slots] == at
        # A slot that holds another position, or nothing, is read as a token that does not exist.
        return context_state(np.where(found, self._tokens[slots], self.vocab_size + _POISON))

    def _logits_of(self, states: UInt64s) -> Float32s:
        vocabulary = np.arange(self.vocab_size, dtype=np.uint64)
        mixed = mix(states[:, None] ^ mix(vocabulary)[None, :])
        logits = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(_SPREAD / 2**24)
        logits[:, list(self.options.never)] = -1000.0
        return logits


def context_state(token_ids: NDArray[np.int64]) -> np.uint64:
    """A hash of a context, in which the order counts."""
    positions = np.arange(len(token_ids), dtype=np.uint64)
    state: np.uint64 = np.bitwise_xor.reduce(mix(mix(positions) + token_ids.astype(np.uint64)))
    return state


def mix(values: UInt64s) -> UInt64s:
    """The finaliser of SplitMix64 (Steele et al., 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
