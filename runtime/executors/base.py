"""The executor contract: all that the rest of the runtime knows of a device.

    plan -> StepBatch -> launch -> PendingStep.wait -> SampledTokens -> apply

What a row may draw can depend on tokens or masks that are known only after the launch. Such a step
is launched up to its logits, and drawn late:

    plan -> StepBatch -> launch_forward -> UndrawnStep.draw(masks, ...) -> PendingStep.wait -> ...

Sampling belongs to the executor, because on a GPU the logits never leave the device; executors
without a device sampler use runtime/sampling/sampler.py on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import Limits
from trtc.runtime.sampling.sampler import SampledTokens, SamplingBatch

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Bytes = NDArray[np.uint8]

MAX_STEPS_IN_FLIGHT = 2
"""Of an executor that runs ahead."""
NO_SOURCE = -1
"""In `StepBatch.token_sources`: `token_ids` has the token."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One ragged batch: T tokens of B sequences, prefill chunks and decodes mixed, no padding.

    protos/step.py's STEP_INPUTS has the shape and the meaning of each array.
    """

    token_ids: Int32s
    positions: Int32s
    slots: Int32s
    query_start: Int32s
    context_lens: Int32s
    page_table: Int32s
    logit_rows: Int32s
    """One row occurs n times where a request forks."""
    token_sources: Int32s | None = None
    """Of tokens that the host does not know yet: the row, 0 to R - 1, of the launch before this
    one that draws it, or NO_SOURCE. Where it names a row, `token_ids` means nothing. None: the host
    knows all, as it always does with executors that do not run ahead."""


class DraftRows(NamedTuple):
    """How an executor checks drafts (runtime/engine/drafting.py)."""

    most: int
    """Logit rows of a step with drafts, those of all its sequences: more would take more time than
    drafts save, or room that the executor does not have. At least max_batch_size rows are there for
    steps without."""
    as_sequences: bool
    """Whether a step has each draft as a sequence of one token, with the page table of the one that
    it belongs to. So kernels for decodes check drafts, which take one new token a sequence; what
    they read of other sequences' pages, all rows of the step have written before."""


class PendingStep(Protocol):
    """A step under way."""

    def wait(self) -> SampledTokens:
        """Block until the step is done, with the GIL free. Steps are waited for in order, once.

        Raises:
            EnvironmentFault: the device failed; the executor can't be used again.
        """
        ...


class PageRead(Protocol):
    """A copy of pages to the host under way."""

    def wait(self) -> Bytes:
        """[number of pages, page_bytes of the layout] of each page its row of every region, one
        after another. Blocks until they are there; may be called again.

        Raises:
            EnvironmentFault: the device failed; the executor can't be used again.
        """
        ...


class Landed(NamedTuple):
    """Pages that are on the host (implements PageRead)."""

    data: Bytes

    def wait(self) -> Bytes:
        return self.data


class UndrawnStep(Protocol):
    """A step under way that computes logits, and is not sampled yet."""

    def draw(self, sampling: SamplingBatch) -> PendingStep:
        """Draw a token for each of its logit rows. Once, and after the steps before it have been
        waited for."""
        ...


class Executor(Protocol):
    """An opened engine with its KV pool. Not thread-safe: one thread drives it.

    Steps and whatever is done to pages take effect in the order of the calls, each after those
    before it: a step reads and overwrites what earlier ones wrote.
    """

    @property
    def limits(self) -> Limits: ...

    @property
    def kv(self) -> CacheLayout: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is done, so that a second step may be launched
        meanwhile: planned, built and queued while the device computes. Never more than
        MAX_STEPS_IN_FLIGHT are."""
        ...

    @property
    def counts_pending(self) -> bool:
        """Whether penalties count tokens that the host does not know yet: those that
        `SamplingBatch.pending` names. Otherwise the draw of a sequence with penalties waits for its
        last token."""
        ...

    @property
    def draft_rows(self) -> DraftRows | None:
        """How it checks drafts; None: it checks none."""
        ...

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        """Start a step and sample one token for each of `batch.logit_rows`.

        A device returns at once; an executor on the host may compute here. One that
        runs ahead takes pending tokens as `batch.token_sources` says; a row whose logits were
        invalid must have drawn some token of the vocabulary for that.
        """
        ...

    def launch_forward(self, batch: StepBatch) -> UndrawnStep:
        """Start a step up to its logits. It is drawn before the next one is launched, and its draws
        honour `SamplingBatch.masks`."""
        ...

    def logits(self, batch: StepBatch) -> Float32s:
        """Run a step and return its logits [R, vocab_size]: for evaluation, not for serving."""
        ...

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages of every layer: copy-on-write, before a launch.

        A target may be the source of an earlier pair, never of a later one.
        """
        ...

    @property
    def moves_pages(self) -> bool:
        """Whether `read_pages` and `write_pages` work: not where each page is spread over
        devices."""
        ...

    def read_pages(self, pages: Sequence[int]) -> PageRead:
        """Begin to copy whole pages, of any group, to the host.

        A device copies asynchronously, in stream order. Only an executor of the same engine can use
        the bytes.

        Raises:
            UnsupportedError: this executor moves none.
        """
        ...

    def write_pages(self, pages: Sequence[int], data: Bytes) -> None:
        """Put what `read_pages` gave into pages, perhaps others, before the next launch.

        Args:
            data: [number of pages, page_bytes of the layout]; may change after the call.

        Raises:
            UnsupportedError: this executor moves none.
        """
        ...

    @property
    def keeps_weights(self) -> bool:
        """Whether `weights_on_host` works: not where weights are within a vendor's engine, or in
        other processes."""
        ...

    def weights_on_host(self) -> Bytes:
        """All weights, as `OpenRequest.weights` takes them. They outlive the executor.

        Raises:
            UnsupportedError: this executor gives none.
            EnvironmentFault: the device failed.
        """
        ...

    def check(self) -> None:
        """Called periodically while idle.

        Raises:
            EnvironmentFault: the device has failed meanwhile.
        """
        ...

    def close(self) -> None:
        """Free the pool and the engine; idempotent."""
        ...


class ExecutorSizes:
    """What an Executor says of its engine and its pool, where that is known when it is made."""

    def __init__(self, limits: Limits, kv: CacheLayout, vocab_size: int, num_pages: int) -> None:
        self._limits = limits
        self._kv = kv
        self._vocab_size = vocab_size
        self._num_pages = num_pages

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def kv(self) -> CacheLayout:
        return self._kv

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def num_pages(self) -> int:
        return self._num_pages
