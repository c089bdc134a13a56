"""Copies between host and device through pinned memory, in the order of a stream."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from trtc.protos.errors import EnvironmentFault
from trtc.runtime.executors.cuda.device import Bytes, Place
from trtc.runtime.executors.cuda.torch_memory import TorchMemory, part

_STAGE_BYTES = 32 << 20
_UPLOADERS = 4
_SEND_SLOTS = 4
"""Steps whose inputs may wait in pinned memory at once."""
_RESTART = "Restart the server"
_POLL_S = 20e-6
"""Between two looks at an event that another rank's end could keep from ever coming."""


class EventWaiter:
    """Waits for events of one device, until it is abandoned.

    Args:
        is_rank: whether another device's end can keep an event from ever coming.
    """

    def __init__(self, *, is_rank: bool) -> None:
        self._is_rank = is_rank
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """A rank's waits end with an EnvironmentFault. From any thread."""
        self._abandoned.set()

    def wait(self, event: torch.cuda.Event) -> None:
        """Block until the work before an event is done.

        Raises:
            EnvironmentFault: the GPU failed, or was abandoned.
        """
        try:
            if not self._is_rank:
                event.synchronize()
                return
            while not event.query():  # type: ignore[no-untyped-call]
                if self._abandoned.is_set():
                    raise EnvironmentFault("the GPU was abandoned")
                time.sleep(_POLL_S)
        except torch.AcceleratorError as error:
            problem = f"the GPU failed: {str(error).splitlines()[0]}"
            raise EnvironmentFault(problem, remedy=_RESTART) from error


class TorchTransfers:
    """The copies of one stream.

    Pinned memory of sends and fetches is kept for good: torch records an event when it is freed,
    and one that is recorded while a graph is captured fails when it is asked for.
    """

    def __init__(self, stream: torch.cuda.Stream, waiter: EventWaiter) -> None:
        self._stream = stream
        self._waiter = waiter
        self._slots = [(torch.empty(0, dtype=torch.uint8), _event()) for _ in range(_SEND_SLOTS)]
        self._next_slot = 0
        self._landings: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._pinned: list[torch.Tensor] = []

    def fill(self, memory: TorchMemory, data: Bytes) -> None:
        """Copy `data` to a block of its size, and wait for it. Several threads fill the pinned
        memory: a mapped file is read at their speed."""
        stages = [
            torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_UPLOADERS)
        ]
        events = [_event() for _ in stages]
        begins = range(0, len(data), _STAGE_BYTES)

        def stage(number: int, begin: int) -> torch.Tensor:
            pinned, piece = stages[number], data[begin : begin + _STAGE_BYTES]
            events[number].synchronize()
            np.copyto(pinned.numpy()[: len(piece)], piece)
            return pinned[: len(piece)]

        with ThreadPoolExecutor(_UPLOADERS) as pool, torch.cuda.stream(self._stream):
            pending: list[tuple[int, int, Any]] = []
            for at, begin in enumerate(begins):
                if len(pending) == _UPLOADERS:
                    self._send_stage(memory, events, *pending.pop(0))
                number = at % _UPLOADERS
                pending.append((number, begin, pool.submit(stage, number, begin)))
            for one in pending:
                self._send_stage(memory, events, *one)
        self._stream.synchronize()

    def _send_stage(
        self, memory: TorchMemory, events: list[torch.cuda.Event], number: int, begin: int, job: Any
    ) -> None:
        staged = job.result()
        memory.tensor[begin : begin + len(staged)].copy_(staged, non_blocking=True)
        events[number].record(self._stream)

    def send(self, data: Bytes, target: Place) -> None:
        """Enqueue a copy of `data`, which may change after it."""
        stage, event = self._slot(len(data))
        stage.numpy()[: len(data)] = data
        with torch.cuda.stream(self._stream):
            part(target, len(data)).copy_(stage[: len(data)], non_blocking=True)
            event.record(self._stream)

    def _slot(self, num_bytes: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Pinned memory whose last copy is over."""
        self._next_slot = (self._next_slot + 1) % _SEND_SLOTS
        stage, event = self._slots[self._next_slot]
        self._waiter.wait(event)
        if len(stage) < num_bytes:
            stage = self._pin(num_bytes)
            self._slots[self._next_slot] = (stage, event)
        return stage, event

    def fetch(self, source: Place, num_bytes: int) -> "TorchDownload":
        """Enqueue a copy to the host."""
        target, event = self._landing(num_bytes)
        with torch.cuda.stream(self._stream):
            target[:num_bytes].copy_(part(source, num_bytes), non_blocking=True)
            event.record(self._stream)
        return TorchDownload(self, target, event, num_bytes)

    def _landing(self, num_bytes: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Pinned memory that no download waits in."""
        for at, (target, _) in enumerate(self._landings):
            if len(target) >= num_bytes:
                return self._landings.pop(at)
        return self._pin(num_bytes), _event()

    def _pin(self, num_bytes: int) -> torch.Tensor:
        self._pinned.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
        return self._pinned[-1]

    def land(self, target: torch.Tensor, event: torch.cuda.Event, num_bytes: int) -> Bytes:
        """Wait for a download and copy it out of its memory, which the next one may have."""
        self._waiter.wait(event)
        data: Bytes = target.numpy()[:num_bytes].copy()
        self._landings.append((target, event))
        return data


class TorchDownload:
    """A copy into a landing, which is given back once it has been read (implements Download)."""

    def __init__(
        self,
        transfers: TorchTransfers,
        target: torch.Tensor,
        event: torch.cuda.Event,
        num_bytes: int,
    ) -> None:
        self._transfers = transfers
        self._landing = (target, event, num_bytes)
        self._result: Bytes | None = None

    def wait(self) -> Bytes:
        if self._result is None:
            self._result = self._transfers.land(*self._landing)
        return self._result


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
