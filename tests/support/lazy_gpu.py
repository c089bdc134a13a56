"""A driver's device with two streams, whose work is done in any order that its events allow."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass
class _Event:
    """How often it was recorded, and how many of these have come."""

    recorded: int = 0
    come: int = 0


@dataclass
class _Work:
    run: Callable[[], None]
    waits_for: tuple[_Event, int] | None = None


@dataclass
class LazyGpu:
    """Memory of the host; `finish` does what was enqueued."""

    num_bytes: int
    rng: random.Random
    memory: Bytes = field(init=False)
    _main: list[_Work] = field(default_factory=list)
    _copies: list[_Work] = field(default_factory=list)
    _events: list[_Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = np.zeros(self.num_bytes, np.uint8)

    def host_buffer(self, num_bytes: int) -> Bytes:
        return np.zeros(num_bytes, np.uint8)

    def event(self) -> int:
        self._events.append(_Event())
        return len(self._events) - 1

    def set_event(self, event: int) -> None:
        self._record(self._main, event)

    def upload(self, address: int, source: Bytes) -> None:
        self._main.append(_Work(lambda: self._write(address, source)))

    def upload_beside(self, address: int, source: Bytes, *, after: int, done: int) -> None:
        self._wait(self._copies, after)
        self._copies.append(_Work(lambda: self._write(address, source)))
        self._record(self._copies, done)
        self._wait(self._main, done)

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue a kernel."""
        self._main.append(_Work(work))

    def await_event(self, event: int) -> None:
        one, wanted = self._events[event], self._events[event].recorded
        while one.come < wanted:
            self._advance()

    def finish(self) -> None:
        while self._main or self._copies:
            self._advance()

    def _advance(self) -> None:
        ready = [
            stream
            for stream in (self._main, self._copies)
            if stream
            and (
                stream[0].waits_for is None or stream[0].waits_for[0].come >= stream[0].waits_for[1]
            )
        ]
        assert ready, "streams wait for each other"
        self.rng.choice(ready).pop(0).run()

    def _record(self, stream: list[_Work], event: int) -> None:
        one = self._events[event]
        one.recorded += 1

        def come(number: int = one.recorded) -> None:
            one.come = number

        stream.append(_Work(come))

    def _wait(self, stream: list[_Work], event: int) -> None:
        one = self._events[event]
        stream.append(_Work(lambda: None, (one, one.recorded)))

    def _write(self, address: int, source: Bytes) -> None:
        self.memory[address : address + len(source)] = source
