"""Waiting for a GPU's events: until they come, the GPU fails, or the device is abandoned."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from trtc.protos.errors import EnvironmentFault
from trtc.runtime.executors.cuda.torch_transfers import EventWaiter


@dataclass
class FakeEvent:
    """Comes after it was asked for `queries_left` times; never, if that is None."""

    queries_left: int | None = None
    failure: Exception | None = None
    was_synchronized: bool = False

    def synchronize(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.was_synchronized = True

    def query(self) -> bool:
        if self.failure is not None:
            raise self.failure
        if self.queries_left is None:
            return False
        self.queries_left -= 1
        return self.queries_left < 0


def test_a_device_alone_leaves_the_waiting_to_the_driver() -> None:
    event: Any = FakeEvent()
    EventWaiter(is_rank=False).wait(event)
    assert event.was_synchronized


def test_a_rank_looks_until_its_event_has_come() -> None:
    event: Any = FakeEvent(queries_left=3)
    EventWaiter(is_rank=True).wait(event)
    assert event.queries_left == -1
    assert not event.was_synchronized


def test_a_rank_that_is_abandoned_stops_waiting() -> None:
    waiter, event = EventWaiter(is_rank=True), FakeEvent()
    timer = threading.Timer(0.05, waiter.abandon)
    timer.start()
    with pytest.raises(EnvironmentFault, match="the GPU was abandoned"):
        waiter.wait(event)  # type: ignore[arg-type]
    timer.join()


@pytest.mark.parametrize("is_rank", [False, True])
def test_a_failed_gpu_is_a_fault_of_the_environment(is_rank: bool) -> None:
    event: Any = FakeEvent(failure=torch.AcceleratorError("CUDA error: unknown\nand more"))
    with pytest.raises(EnvironmentFault, match="the GPU failed: CUDA error: unknown") as caught:
        EventWaiter(is_rank=is_rank).wait(event)
    assert "more" not in str(caught.value)
    assert caught.value.remedy == "Restart the server"
