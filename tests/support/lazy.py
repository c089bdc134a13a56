"""An echo executor that runs ahead, as late as it may."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from trtc.runtime.executors.base import (
    NO_SOURCE,
    Bytes,
    Int32s,
    PageRead,
    PendingStep,
    StepBatch,
    UndrawnStep,
)
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.sampling.pending import with_pending_counted
from trtc.runtime.sampling.sampler import NO_PENDING, SampledTokens, SamplingBatch

_UNKNOWN = -(10**6)
"""What stands for a token that the host does not know: no vocabulary has it."""


class LazyEcho(EchoExecutor):
    """Queues copies and steps, as a device's stream does, and computes them when one is waited for.

    It holds the host to the contract: two steps in flight at most, waited for in order, once; one
    that was launched without its samples is drawn before the next launch, when the steps before it
    have been waited for; and a token whose source is given is taken from there alone. The arrays of
    a step are not copied, so that one which is changed after its launch gives wrong tokens.
    """

    def __init__(self, options: EchoOptions | None = None) -> None:
        super().__init__(options)
        self._stream: deque[Callable[[], object]] = deque()
        self._in_flight: deque[LazyStep] = deque()
        self._sampled: Int32s | None = None
        """[R] tokens of the step computed last."""
        self.num_pending_tokens = 0
        """Tokens that were launched before the host knew them."""
        self.num_ahead = 0
        """Steps that were launched while another one was in flight."""
        self.num_counted = 0
        """Tokens that penalties counted before the host knew them."""
        self.num_drawn_late = 0
        """Steps that were launched without their samples."""

    @property
    def runs_ahead(self) -> bool:
        return True

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        return self.queue(batch, sampling)

    def launch_forward(self, batch: StepBatch) -> "LazyStep":
        self.num_drawn_late += 1
        return self.queue(batch, None)

    def queue(self, batch: StepBatch, sampling: SamplingBatch | None) -> "LazyStep":
        """Both launches; `sampling` is None where it comes later."""
        assert len(self._in_flight) < 2, "a third step was launched"
        assert batch.token_sources is None or self._in_flight, "a source, but no step in flight"
        assert all(step.sampling is not None for step in self._in_flight), "a step is not drawn"
        self.num_ahead += len(self._in_flight)
        step = LazyStep(self, batch, sampling)
        self._in_flight.append(step)
        self._stream.append(step.compute)
        return step

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        copy = super().copy_pages
        self._stream.append(lambda: copy(sources, targets))

    def is_oldest(self, step: "LazyStep") -> bool:
        return self._in_flight[0] is step

    def read_pages(self, pages: Sequence[int]) -> PageRead:
        read = LazyRead(self, tuple(pages))
        self._stream.append(read.run)
        return read

    def write_pages(self, pages: Sequence[int], data: Bytes) -> None:
        write, rows = super().write_pages, data.copy()
        self._stream.append(lambda: write(pages, rows))

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """What a stream does before it has done some work of it."""
        while not is_done():
            self._stream.popleft()()

    def read_now(self, pages: Sequence[int]) -> Bytes:
        return super().read_pages(pages).wait()

    def complete(self, step: "LazyStep") -> SampledTokens:
        assert self._in_flight, "waited for twice"
        assert self._in_flight[0] is step, "waited for out of order"
        assert step.sampling is not None, "waited for before it was drawn"
        self.run_until(lambda: step.tokens is not None)
        assert step.tokens is not None
        self._in_flight.popleft()
        return step.tokens

    def compute(self, batch: StepBatch, sampling: SamplingBatch) -> SampledTokens:
        return self.draw(self.forward(batch), sampling)

    def forward(self, batch: StepBatch) -> UndrawnStep:
        return super().launch_forward(self._resolved(batch))

    def draw(self, step: UndrawnStep, sampling: SamplingBatch) -> SampledTokens:
        if sampling.pending is not None:
            assert self.counts_pending
            assert self._sampled is not None
            pending = sampling.pending[sampling.pending != NO_PENDING]
            assert len(pending) and pending.dtype == np.int32
            self.num_counted += len(pending)
            sampling = with_pending_counted(sampling, self._sampled)
        tokens = step.draw(sampling).wait()
        self._sampled = tokens.token_ids
        return tokens

    def _resolved(self, batch: StepBatch) -> StepBatch:
        sources = batch.token_sources
        if sources is None:
            return batch
        pending = sources != NO_SOURCE
        assert pending.any()
        assert self._sampled is not None
        assert sources.shape == batch.token_ids.shape
        assert sources.dtype == np.int32
        self.num_pending_tokens += int(pending.sum())
        token_ids = np.where(pending, _UNKNOWN, batch.token_ids)
        token_ids[pending] = self._sampled[sources[pending]]
        return replace(batch, token_ids=token_ids, token_sources=None)


@dataclass(eq=False)
class LazyStep:
    executor: LazyEcho
    batch: StepBatch
    sampling: SamplingBatch | None
    tokens: SampledTokens | None = None
    forward: UndrawnStep | None = None
    """A step that was computed before it was drawn: pages behind it were waited for."""

    def draw(self, sampling: SamplingBatch) -> PendingStep:
        assert self.sampling is None, "drawn twice"
        assert self.executor.is_oldest(self), "drawn before the steps before it were waited for"
        self.sampling = sampling
        if self.forward is not None:
            self.tokens = self.executor.draw(self.forward, sampling)
        return self

    def compute(self) -> None:
        if self.sampling is None:
            self.forward = self.executor.forward(self.batch)
        else:
            self.tokens = self.executor.compute(self.batch, self.sampling)

    def wait(self) -> SampledTokens:
        return self.executor.complete(self)


@dataclass(eq=False)
class LazyRead:
    executor: LazyEcho
    pages: tuple[int, ...]
    data: Bytes | None = None

    def run(self) -> None:
        self.data = self.executor.read_now(self.pages)

    def wait(self) -> Bytes:
        self.executor.run_until(lambda: self.data is not None)
        assert self.data is not None
        return self.data
