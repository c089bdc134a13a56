"""Runs an engine of TensorRT plans: one plan, or several with plugins' kernels between them.

    upload -> [plan | kernel] ... -> download -> wait -> sample on the host

Every tensor has a fixed address for the lifetime of the executor, and each pool has the same one as
input and output, so a step is identified by its profile and its sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from trtc.protos.errors import InvariantError, UnsupportedError
from trtc.protos.manifest import Limits
from trtc.protos.stages import Stages
from trtc.runtime.device.base import DriverDevice
from trtc.runtime.executors.base import (
    Bytes,
    DraftRows,
    ExecutorSizes,
    Float32s,
    Landed,
    PageRead,
    PendingStep,
    StepBatch,
    UndrawnStep,
)
from trtc.runtime.executors.tensorrt_graphs import GraphCache
from trtc.runtime.executors.tensorrt_launch import LoadedLaunch
from trtc.runtime.executors.tensorrt_memory import EngineMemory
from trtc.runtime.executors.tensorrt_plan import LoadedPlan
from trtc.runtime.sampling.sampler import SampledTokens, SamplingBatch, sample

LoadedStage = LoadedPlan | LoadedLaunch
_MOST_DRAFT_ROWS = 64
"""More rows cost more time than drafts save."""


@dataclass(frozen=True)
class _Pending:
    """A step in flight (implements PendingStep)."""

    finish: Callable[[], Float32s]
    sampling: SamplingBatch

    def wait(self) -> SampledTokens:
        return sample(self.finish(), self.sampling)


@dataclass(frozen=True)
class _Undrawn:
    """A step in flight that is not drawn yet (implements UndrawnStep)."""

    finish: Callable[[], Float32s]

    def draw(self, sampling: SamplingBatch) -> PendingStep:
        return _Pending(self.finish, sampling)


class TensorRtExecutor(ExecutorSizes):
    """An opened engine of plans with its KV pool (implements Executor)."""

    def __init__(
        self,
        device: DriverDevice,
        stages: Stages,
        loaded: Sequence[LoadedStage],
        *,
        limits: Limits,
        vocab_size: int,
        num_pages: int,
    ) -> None:
        """Allocate memory and bind every stage to it; the executor owns the device from now on.

        Args:
            loaded: the loaded stages of `stages.stages`, in order.

        Raises:
            EnvironmentFault: the pool does not fit, or the library refuses.
        """
        super().__init__(limits, stages.pool, vocab_size, num_pages)
        self._device = device
        self._stages = stages
        self._loaded = loaded
        self._plans = [stage for stage in loaded if isinstance(stage, LoadedPlan)]
        scratch_bytes = max(plan.scratch_bytes for plan in self._plans)
        scratch = device.allocate(scratch_bytes)
        self._memory = EngineMemory(device, stages, limits, vocab_size, num_pages)
        for stage in loaded:
            if isinstance(stage, LoadedPlan):
                stage.bind(self._memory.addresses, scratch, scratch_bytes)
            else:
                stage.bind(self._memory.addresses)
        device.synchronize()
        self._graphs = GraphCache(device, self._can_capture)
        self._is_under_way = False
        self._closed = False

    @property
    def runs_ahead(self) -> bool:
        """False: tokens are drawn on the host, which needs a step's logits to build the next."""
        return False

    @property
    def counts_pending(self) -> bool:
        return False

    @property
    def draft_rows(self) -> DraftRows | None:
        """Each draft is a sequence: plans have as many logit rows as sequences."""
        most = min(self._limits.max_batch_size, _MOST_DRAFT_ROWS)
        return DraftRows(most, as_sequences=True) if most > 1 else None

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        return self.launch_forward(batch).draw(sampling)

    def launch_forward(self, batch: StepBatch) -> UndrawnStep:
        return _Undrawn(self._start(batch))

    def logits(self, batch: StepBatch) -> Float32s:
        """See Executor. Plans give logits of at most max_batch_size rows: a step with more rows
        runs several times, and writes the same keys and values each time."""
        result = np.empty((len(batch.logit_rows), self._vocab_size), np.float32)
        # A step without logits is run too, for its keys and values.
        for begin in range(0, max(1, len(result)), self._limits.max_batch_size):
            rows = slice(begin, begin + self._limits.max_batch_size)
            result[rows] = self._start(replace(batch, logit_rows=batch.logit_rows[rows]))()
        return result

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._check_open()
        self._memory.copy_pages(sources, targets)

    @property
    def moves_pages(self) -> bool:
        return True

    @property
    def keeps_weights(self) -> bool:
        return False

    def weights_on_host(self) -> Bytes:
        raise UnsupportedError("TensorRT keeps weights within its engine")

    def read_pages(self, pages: Sequence[int]) -> PageRead:
        self._check_open()
        return Landed(self._memory.read_pages(pages))

    def write_pages(self, pages: Sequence[int], data: Bytes) -> None:
        self._check_open()
        self._memory.write_pages(pages, data)

    def check(self) -> None:
        """Nothing to check: failures of a GPU are reported when it is used."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._device.make_current()
        if self._is_under_way:
            self._device.synchronize()
        for plan in self._plans:
            plan.close()
        self._device.close()

    def _start(self, batch: StepBatch) -> Callable[[], Float32s]:
        """Enqueue a step; returns a function that waits for its logits."""
        self._check_open()
        if self._is_under_way:
            raise InvariantError("a step is under way: its result was never waited for")
        sizes = self._memory.inputs.upload(batch)
        extents = sizes.extents(self._num_pages)
        profile = self._profile(extents)
        self._graphs.run((profile, sizes), lambda: self._enqueue(profile, extents))
        rows = len(batch.logit_rows)
        host = self._memory.host_logits[: 4 * rows * self._vocab_size]
        if rows:
            self._device.download(host, self._memory.addresses["logits"])
        self._is_under_way = True
        return lambda: self._finish(host.view(np.float32).reshape(rows, self._vocab_size))

    def _finish(self, logits: Float32s) -> Float32s:
        self._device.make_current()
        self._device.synchronize()
        self._is_under_way = False
        return logits

    def _enqueue(self, profile: int, extents: Mapping[str, int]) -> None:
        for stage in self._loaded:
            stage.enqueue(profile, extents)

    def _profile(self, extents: Mapping[str, int]) -> int:
        """The first profile that supports these sizes; the narrowest is first."""
        for index, profile in enumerate(self._stages.profiles):
            bounds = profile.extents
            if all(bounds[axis][0] <= size <= bounds[axis][2] for axis, size in extents.items()):
                return index
        raise InvariantError(f"no profile takes a step of {dict(extents)}")

    def _can_capture(self, profile: int) -> bool:
        return all(plan.can_be_captured(profile) for plan in self._plans)

    def _check_open(self) -> None:
        """Make the context current: the thread that uses the executor may not have opened it."""
        if self._closed:
            raise InvariantError("the executor is closed")
        self._device.make_current()
