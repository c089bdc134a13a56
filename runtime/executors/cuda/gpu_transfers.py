"""Copies between host and device through page-locked memory, in the order of a GPU's stream."""

import itertools
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate

from trtc.protos.errors import EnvironmentFault
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.executors.cuda.device import Bytes, HostBytes, Place, Span
from trtc.runtime.executors.cuda.gpu_memory import address

_STAGE_BYTES = 32 << 20
_UPLOADERS = 4
_SEND_SLOTS = 8
"""Page-locked buffers for copies to the device: the copies of a step that is drawn late (its
columns, four sparse lists, masks) wait for its logits while the next step is sent."""
_POLL_S = 20e-6
"""Seconds between two polls of an event that may never complete if another rank ends."""


class EventWaiter:
    """Waits for events of one GPU, until it is abandoned.

    Args:
        is_rank: whether an event may never complete because another rank has ended.
    """

    def __init__(self, gpu: CudaDriverDevice, *, is_rank: bool) -> None:
        self._gpu = gpu
        self._is_rank = is_rank
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """Make a rank's waits raise EnvironmentFault. Thread-safe."""
        self._abandoned.set()

    def wait(self, event: int) -> None:
        """Block until the work before an event is done.

        Raises:
            EnvironmentFault: the GPU failed, or was abandoned.
        """
        if not self._is_rank:
            self._gpu.await_event(event)
            return
        while not self._gpu.has_come(event):
            if self._abandoned.is_set():
                raise EnvironmentFault("the GPU was abandoned", remedy="Restart the server")
            time.sleep(_POLL_S)


class GpuTransfers:
    """The copies of one stream. Page-locked memory, which is slow to allocate, is reused."""

    def __init__(self, gpu: CudaDriverDevice, waiter: EventWaiter) -> None:
        self._gpu = gpu
        self._waiter = waiter
        self._slots = [(gpu.host_buffer(1), gpu.event()) for _ in range(_SEND_SLOTS)]
        self._next_slot = 0
        self._sent = gpu.event()
        """Of the last `send`."""
        self._landings: list[tuple[Bytes, int]] = []
        self._next_stage = 0

    def fill(self, target: int, data: HostBytes) -> None:
        """Copy `data` to an address, and wait for it. Several threads fill the page-locked memory,
        to read files faster.

        Raises:
            EngineCorruptError: `data` is no longer readable.
        """
        stages = itertools.cycle(self._stages)
        with ThreadPoolExecutor(_UPLOADERS) as pool:
            pending: deque[tuple[int, int, Future[Bytes]]] = deque()
            for begin in range(0, data.num_bytes, _STAGE_BYTES):
                if len(pending) == _UPLOADERS:
                    self._send_stage(*pending.popleft())
                buffer, event = next(stages)
                piece = buffer[: min(_STAGE_BYTES, data.num_bytes - begin)]
                staged = pool.submit(self._stage, data, begin, piece, event)
                pending.append((target + begin, event, staged))
            while pending:
                self._send_stage(*pending.popleft())
        self._gpu.synchronize()

    def _stage(self, data: HostBytes, begin: int, piece: Bytes, event: int) -> Bytes:
        self._gpu.await_event(event)
        data.read(begin, piece)
        return piece

    def _send_stage(self, target: int, event: int, staged: "Future[Bytes]") -> None:
        self._gpu.upload(target, staged.result())
        self._gpu.set_event(event)

    @cached_property
    def _stages(self) -> list[tuple[Bytes, int]]:
        return [(self._gpu.host_buffer(_STAGE_BYTES), self._gpu.event()) for _ in range(_UPLOADERS)]

    def send(self, data: Bytes, target: Place) -> None:
        """Enqueue a copy of `data`, which may change after the call."""
        stage, event = self._slot(len(data))
        stage[: len(data)] = data
        self._gpu.upload(address(target), stage[: len(data)])
        self._gpu.set_event(event)
        self._gpu.set_event(self._sent)

    def send_early(self, data: Bytes, target: Place) -> None:
        """As `send`, but the copy waits for nothing that was enqueued after the last `send`."""
        stage, event = self._slot(len(data))
        stage[: len(data)] = data
        self._gpu.upload_beside(address(target), stage[: len(data)], after=self._sent, done=event)

    def _slot(self, num_bytes: int) -> tuple[Bytes, int]:
        """Page-locked memory whose last copy is complete."""
        self._next_slot = (self._next_slot + 1) % _SEND_SLOTS
        stage, event = self._slots[self._next_slot]
        self._waiter.wait(event)
        if len(stage) < num_bytes:
            stage = self._gpu.host_buffer(num_bytes)
            self._slots[self._next_slot] = (stage, event)
        return stage, event

    def fetch(self, source: Place, num_bytes: int) -> "GpuDownload":
        """Enqueue a copy to the host."""
        return self.gather([Span(source, num_bytes)])

    def gather(self, sources: Sequence[Span]) -> "GpuDownload":
        """Enqueue copies to the host, concatenated in one buffer."""
        num_bytes = sum(span.num_bytes for span in sources)
        target, event = self._landing(num_bytes)
        begin = 0
        for span in sources:
            self._gpu.download(target[begin : begin + span.num_bytes], address(span.place))
            begin += span.num_bytes
        self._gpu.set_event(event)
        return GpuDownload(self, target, event, num_bytes)

    def scatter(self, data: Bytes, targets: Sequence[Span]) -> None:
        """Enqueue copies of `data`, which may change after the call, through the buffers of
        `fill`."""
        ends = list(accumulate(span.num_bytes for span in targets))
        for begin in range(0, len(data), _STAGE_BYTES):
            end = min(begin + _STAGE_BYTES, len(data))
            self._next_stage = (self._next_stage + 1) % _UPLOADERS
            stage, event = self._stages[self._next_stage]
            self._waiter.wait(event)
            stage[: end - begin] = data[begin:end]
            for number in range(bisect_right(ends, begin), bisect_left(ends, end) + 1):
                span, first = targets[number], ends[number] - targets[number].num_bytes
                low, high = max(begin, first), min(end, ends[number])
                self._gpu.upload(
                    address(span.place) + low - first, stage[low - begin : high - begin]
                )
            self._gpu.set_event(event)

    def _landing(self, num_bytes: int) -> tuple[Bytes, int]:
        """Page-locked memory that holds no unread download."""
        for at, (target, _) in enumerate(self._landings):
            if len(target) >= num_bytes:
                return self._landings.pop(at)
        return self._gpu.host_buffer(num_bytes), self._gpu.event()

    def land(self, target: Bytes, event: int, num_bytes: int) -> Bytes:
        """Wait for a download and copy it out of its buffer, which is free after that."""
        self._waiter.wait(event)
        data: Bytes = target[:num_bytes].copy()
        self._landings.append((target, event))
        return data


class GpuDownload:
    """A copy into a page-locked buffer, which is returned after the read (implements Download)."""

    def __init__(self, transfers: GpuTransfers, target: Bytes, event: int, num_bytes: int) -> None:
        self._transfers = transfers
        self._landing = (target, event, num_bytes)
        self._result: Bytes | None = None

    def wait(self) -> Bytes:
        if self._result is None:
            self._result = self._transfers.land(*self._landing)
        return self._result
