"""A rank other than 0: a process that executes rank 0's orders.

    socket -> orders -> executor (main thread) -> steps in flight -> done (a thread that waits)

It exits on request, on failure, and when rank 0 closes the socket: then at once, whatever its
device does.
"""

import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from trtc.protos.errors import InvariantError, TrtcError
from trtc.runtime.executors.base import (
    MAX_STEPS_IN_FLIGHT,
    Executor,
    PendingStep,
    StepBatch,
    UndrawnStep,
)
from trtc.runtime.executors.ranks.link import Link
from trtc.runtime.executors.ranks.messages import (
    Close,
    CopyPages,
    Draw,
    Failed,
    Forward,
    Launch,
    Logits,
    Open,
    Opened,
    Order,
    Progress,
    Ready,
    digest,
    unpack,
)
from trtc.runtime.sampling.sampler import SamplingBatch

_REPORT_S = 0.2
"""Seconds between two reports of progress, which cost rank 0 time."""


class RankHost(Protocol):
    """The part of a rank that depends on the kind of engine."""

    def free_bytes(self) -> int:
        """Free memory of this rank's device, which is initialised.

        Raises:
            EnvironmentFault: there is no such device.
        """
        ...

    def open(self, order: Open) -> Executor:
        """Load this rank; returns when all ranks have connected.

        Raises:
            TrtcError: the rank cannot be loaded.
        """
        ...


def serve_rank(link: Link[Order], host: RankHost) -> int:
    """Run a rank until its end; returns the exit status."""
    # The parent gets these signals too, and lets running requests end first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders = _read_orders(link)
    try:
        link.send(Ready(host.free_bytes()))
        _serve(link, host, orders)
    except Exception as error:  # noqa: BLE001 (rank 0 receives it, whatever it is)
        _report(link, error)
        return 1
    return 0


def _read_orders(link: Link[Order]) -> "queue.SimpleQueue[Order]":
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def read() -> None:
        while (order := link.receive()) is not None:
            orders.put(order)
            if isinstance(order, Close):
                return
        os._exit(1)  # rank 0 has exited, so work in flight is of no use

    threading.Thread(target=read, name="trtc-rank-orders", daemon=True).start()
    return orders


def _serve(link: Link[Order], host: RankHost, orders: "queue.SimpleQueue[Order]") -> None:
    first = orders.get()
    if isinstance(first, Close):
        return
    if not isinstance(first, Open):
        raise InvariantError(f"the first order is {type(first).__name__}")
    executor = host.open(first)
    link.send(Opened())
    steps = _Steps(link, executor)
    while not isinstance(order := orders.get(), Close):
        match order:
            case Launch():
                steps.launch(order)
            case Forward():
                steps.launch_forward(order)
            case Draw():
                steps.draw(order)
            case Logits():
                steps.run_logits(order)
            case CopyPages():
                executor.copy_pages(order.sources, order.targets)
            case Open():
                raise InvariantError("the engine is open already")
    steps.finish()
    executor.close()


@dataclass(frozen=True)
class _Launched:
    number: int
    step: PendingStep | None
    """None: the step is complete and has drawn nothing."""


class _Steps:
    """Steps in flight: one thread waits for them, another reports their progress to rank 0."""

    def __init__(self, link: Link[Order], executor: Executor) -> None:
        self._link = link
        self._executor = executor
        self._room = threading.Semaphore(MAX_STEPS_IN_FLIGHT)
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._progress = Progress(begun=0, ended=0, digest=0)
        self._undrawn: UndrawnStep | None = None
        """The last launched step, until it is drawn."""
        self._moving = threading.Condition()
        self._moved = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._wait, "trtc-rank-steps"), (self._report, "trtc-rank-news"))
        ]
        for thread in self._threads:
            thread.start()

    def launch(self, order: Launch) -> None:
        self._room.acquire()
        batch, sampling = unpack(StepBatch, order.batch), unpack(SamplingBatch, order.sampling)
        step = self._executor.launch(batch, sampling)
        self._move(begun=order.number)
        self._launched.put(_Launched(order.number, step))

    def launch_forward(self, order: Forward) -> None:
        self._room.acquire()
        batch = unpack(StepBatch, order.batch)
        self._undrawn = self._executor.launch_forward(batch)
        self._move(begun=order.number)

    def draw(self, order: Draw) -> None:
        """Draw the last step, after the steps before it are complete, as on rank 0."""
        if self._undrawn is None:
            raise InvariantError("there is no step to draw")
        with self._moving:
            self._moving.wait_for(lambda: self._progress.ended == order.number - 1)
        step = self._undrawn.draw(unpack(SamplingBatch, order.sampling))
        self._undrawn = None
        self._launched.put(_Launched(order.number, step))

    def run_logits(self, order: Logits) -> None:
        self._move(begun=order.number)
        self._executor.logits(unpack(StepBatch, order.batch))
        self._launched.put(_Launched(order.number, None))

    def finish(self) -> None:
        self._launched.put(None)
        self._threads[0].join()

    def _move(self, **changes: int) -> None:
        with self._moving:
            self._progress = msgspec.structs.replace(self._progress, **changes)
            self._moving.notify_all()
        self._moved.set()

    def _wait(self) -> None:
        with self._reporting_errors():
            drawn = 0
            while (one := self._launched.get()) is not None:
                if one.step is not None:
                    drawn = digest(one.step.wait(), drawn)
                    self._room.release()
                self._move(ended=one.number, digest=drawn)

    def _report(self) -> None:
        with self._reporting_errors():
            while self._moved.wait():
                self._moved.clear()
                self._link.send(self._progress)
                time.sleep(_REPORT_S)

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Context manager that reports errors and exits, without waiting for the main thread, which
        may hang in the device."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (a thread's last frame)
            _report(self._link, error)
            os._exit(1)


def _report(link: Link[Order], error: Exception) -> None:
    if not isinstance(error, TrtcError):
        traceback.print_exception(error)
    try:
        link.send(Failed.of(error))
    except OSError:
        return  # rank 0 has exited
