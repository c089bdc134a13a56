"""An executor over all ranks: rank 0's in this process, and those of the other ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from trtc.protos.errors import UnsupportedError
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import Limits
from trtc.runtime.executors.base import (
    Bytes,
    DraftRows,
    Executor,
    Float32s,
    PageRead,
    PendingStep,
    StepBatch,
    UndrawnStep,
)
from trtc.runtime.executors.ranks.group import RankGroup
from trtc.runtime.executors.ranks.messages import (
    CopyPages,
    Draw,
    Forward,
    Launch,
    Logits,
    Open,
    digest,
    pack,
)
from trtc.runtime.sampling.sampler import NO_LOGPROBS, SampledTokens, SamplingBatch


class LocalRank(Executor, Protocol):
    """The executor of rank 0."""

    def abandon(self) -> None:
        """Release threads that wait for the device, whose work will never end. Thread-safe."""
        ...


@dataclass(frozen=True)
class _ShardedStep:
    """A step in flight on all ranks (implements PendingStep)."""

    owner: "ShardedExecutor"
    number: int
    step: PendingStep

    def wait(self) -> SampledTokens:
        return self.owner.complete(self)


@dataclass(frozen=True)
class _UndrawnShards:
    """A step in flight on all ranks that is not drawn yet (implements UndrawnStep)."""

    owner: "ShardedExecutor"
    number: int
    step: UndrawnStep

    def draw(self, sampling: SamplingBatch) -> PendingStep:
        return self.owner.draw(self, sampling)


def open_ranks(
    group: RankGroup,
    *,
    engine: Path,
    num_pages: int,
    dummy_weights: bool,
    rendezvous: bytes,
    local: Callable[[], LocalRank],
) -> "ShardedExecutor":
    """Load every rank of an engine.

    Args:
        rendezvous: the device's id for connecting collectives.
        local: loads rank 0.

    Raises:
        TrtcError: a rank cannot be loaded.
    """
    orders = [
        Open(str(engine.resolve()), rank, num_pages, dummy_weights, rendezvous)
        for rank in range(1, group.num_ranks)
    ]
    return ShardedExecutor(group.open(orders, local), group)


class ShardedExecutor:
    """Drives all ranks of an engine (implements Executor)."""

    def __init__(self, local: LocalRank, group: RankGroup) -> None:
        group.on_failure(local.abandon)
        self._local = local
        self._group = group
        self._num_steps = 0
        self._digest = 0
        """Digest of all drawn tokens."""
        self._closed = False

    @property
    def limits(self) -> Limits:
        return self._local.limits

    @property
    def kv(self) -> CacheLayout:
        """Layout of one rank's pool; page numbers are the same on all ranks."""
        return self._local.kv

    @property
    def vocab_size(self) -> int:
        return self._local.vocab_size

    @property
    def num_pages(self) -> int:
        return self._local.num_pages

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the other ranks."""
        return self._group.pids

    @property
    def runs_ahead(self) -> bool:
        return self._local.runs_ahead

    @property
    def counts_pending(self) -> bool:
        return self._local.counts_pending

    @property
    def draft_rows(self) -> DraftRows | None:
        return self._local.draft_rows

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        number = self._next_step()
        with self._group.calling():
            self._group.send(Launch(number, pack(batch), pack(_quiet(sampling))))
            return _ShardedStep(self, number, self._local.launch(batch, sampling))

    def launch_forward(self, batch: StepBatch) -> UndrawnStep:
        number = self._next_step()
        with self._group.calling():
            self._group.send(Forward(number, pack(batch)))
            step = self._local.launch_forward(batch)
            return _UndrawnShards(self, number, step)

    def draw(self, undrawn: _UndrawnShards, sampling: SamplingBatch) -> PendingStep:
        """Draw the last step that was launched by `launch_forward`."""
        with self._group.calling():
            self._group.send(Draw(undrawn.number, pack(_quiet(sampling))))
            return _ShardedStep(self, undrawn.number, undrawn.step.draw(sampling))

    def complete(self, step: _ShardedStep) -> SampledTokens:
        """Wait for the oldest step in flight, which has been drawn."""
        with self._group.calling():
            tokens = step.step.wait()
        self._digest = digest(tokens, self._digest)
        self._group.end(step.number, self._digest)
        return tokens

    def logits(self, batch: StepBatch) -> Float32s:
        number = self._next_step()
        with self._group.calling():
            self._group.send(Logits(number, pack(batch)))
            logits = self._local.logits(batch)
        self._group.end(number, self._digest)
        return logits

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        with self._group.calling():
            self._group.send(CopyPages(list(sources), list(targets)))
            self._local.copy_pages(sources, targets)

    @property
    def moves_pages(self) -> bool:
        return False

    @property
    def keeps_weights(self) -> bool:
        return False

    def weights_on_host(self) -> Bytes:
        raise UnsupportedError("each rank's weights are in a process of its own")

    def read_pages(self, pages: Sequence[int]) -> PageRead:
        raise _in_parts()

    def write_pages(self, pages: Sequence[int], data: Bytes) -> None:
        raise _in_parts()

    def check(self) -> None:
        self._group.check()

    def close(self) -> None:
        """Close all ranks. After a failure, rank 0's device may have work that never ends, so it is
        not closed before the process exits."""
        if self._closed:
            return
        self._closed = True
        self._group.close()
        if self._group.failure is None:
            self._local.close()

    def _next_step(self) -> int:
        self._num_steps += 1
        self._group.begin(self._num_steps)
        return self._num_steps


def _quiet(sampling: SamplingBatch) -> SamplingBatch:
    """The batch without log-probabilities, which only rank 0 reports."""
    return replace(sampling, num_logprobs=np.full_like(sampling.num_logprobs, NO_LOGPROBS))


def _in_parts() -> UnsupportedError:
    return UnsupportedError(
        "an engine of several ranks has a part of each page on every GPU, and none is moved",
        remedy="Use an engine that was built for one GPU",
    )
