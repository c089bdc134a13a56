"""The executor contract: the interface between a device and the rest of the runtime.

    plan -> StepBatch -> launch -> PendingStep.wait -> SampledTokens -> apply

A row's draw can depend on tokens or masks that are known only after the launch. Such a step is
launched up to its logits, and drawn later:

    plan -> StepBatch -> launch_forward -> UndrawnStep.draw(masks, ...) -> PendingStep.wait -> ...

Sampling belongs to the executor, because on a GPU the logits never leave the device; executors
without a device sampler use runtime/sampling/sampler.py on the host.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import Limits
from trtc.runtime.sampling.sampler import SampledTokens, SamplingBatch

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Bytes = NDArray[np.uint8]

MAX_STEPS_IN_FLIGHT = 2
"""Most steps in flight of an executor that runs ahead."""
NO_SOURCE = -1
"""In `StepBatch.token_sources`: `token_ids` has the token."""


class StepBatch(msgspec.Struct, frozen=True, eq=False):
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
    """A row occurs n times if a request forks."""
    token_sources: Int32s | None = None
    """For a token that the host does not know yet, the row, 0 to R - 1, of the previous launch that
    draws it, and `token_ids` is undefined; else NO_SOURCE. None: the host knows all tokens, as
    always with executors that do not run ahead."""


class DraftRows(NamedTuple):
    """How an executor verifies drafts (runtime/engine/drafting.py)."""

    most: int
    """Most logit rows of a step with drafts, over all its sequences: more would cost more time than
    drafts save, or exceed the executor's buffers. Steps without drafts may always have
    max_batch_size rows."""
    as_sequences: bool
    """Whether each draft is a sequence of one token in the step, with the page table of its own
    sequence. So decode kernels, which take one new token per sequence, verify drafts; all rows of a
    step write their KV before any row reads it."""


class PendingStep(Protocol):
    """A step in flight."""

    def wait(self) -> SampledTokens:
        """Block until the step is done; releases the GIL. Call it once per step, in order.

        Raises:
            EnvironmentFault: the device failed; the executor can't be used again.
        """
        ...


class PageRead(Protocol):
    """A copy of pages to the host in flight."""

    def wait(self) -> Bytes:
        """[number of pages, page_bytes of the layout]; for each page its rows of all regions, one
        after another. Blocks until the copy is complete; may be called again.

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
    """A step in flight that computes logits, and is not sampled yet."""

    def draw(self, sampling: SamplingBatch) -> PendingStep:
        """Draw a token for each of its logit rows. Call it once, after the previous steps have been
        waited for."""
        ...


class Executor(Protocol):
    """An opened engine with its KV pool. Not thread-safe.

    Steps and operations on pages take effect in the order of the calls: a step reads and overwrites
    the results of earlier ones.
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
        """Whether `launch` returns before the step is done, so that the next step can be planned,
        built and launched while the device computes. At most MAX_STEPS_IN_FLIGHT are in flight."""
        ...

    @property
    def counts_pending(self) -> bool:
        """Whether penalties count tokens that the host does not know yet (`SamplingBatch.pending`).
        Otherwise the draw of a sequence with penalties waits for its last token."""
        ...

    @property
    def draft_rows(self) -> DraftRows | None:
        """How it verifies drafts; None: drafts are not supported."""
        ...

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        """Start a step and sample one token for each of `batch.logit_rows`.

        A device returns at once; an executor on the host may compute here. One that runs ahead
        reads pending tokens by `batch.token_sources`, so even a row with invalid logits must draw
        some token of the vocabulary.
        """
        ...

    def launch_forward(self, batch: StepBatch) -> UndrawnStep:
        """Start a step up to its logits. It must be drawn before the next one is launched. Only
        such draws apply `SamplingBatch.masks`."""
        ...

    def logits(self, batch: StepBatch) -> Float32s:
        """Run a step and return its logits [R, vocab_size]; for evaluation, not for serving."""
        ...

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages of every layer: copy-on-write, before a launch.

        A target may be the source of an earlier pair, never of a later one.
        """
        ...

    @property
    def moves_pages(self) -> bool:
        """Whether `read_pages` and `write_pages` are supported: not if pages are sharded over
        devices."""
        ...

    def read_pages(self, pages: Sequence[int]) -> PageRead:
        """Begin to copy whole pages, of any group, to the host.

        A device copies asynchronously, in stream order. Only an executor of the same engine can use
        the bytes.

        Raises:
            UnsupportedError: `moves_pages` is false.
        """
        ...

    def write_pages(self, pages: Sequence[int], data: Bytes) -> None:
        """Write pages that `read_pages` has read into the same or other pages, before the next
        launch.

        Args:
            data: [number of pages, page_bytes of the layout]; may change after the call.

        Raises:
            UnsupportedError: `moves_pages` is false.
        """
        ...

    @property
    def keeps_weights(self) -> bool:
        """Whether `weights_on_host` is supported: not if weights are in a vendor's engine or in
        other processes."""
        ...

    def weights_on_host(self) -> Bytes:
        """All weights, for `OpenRequest.weights`. They outlive the executor.

        Raises:
            UnsupportedError: `keeps_weights` is false.
            EnvironmentFault: the device failed.
        """
        ...

    def check(self) -> None:
        """Check the device; called periodically while idle.

        Raises:
            EnvironmentFault: the device has failed.
        """
        ...

    def close(self) -> None:
        """Free the pool and the engine; idempotent."""
        ...


class ExecutorSizes:
    """Base of executors whose engine and pool have sizes that are known at construction."""

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
