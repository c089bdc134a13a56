"""Waiting for a GPU's events: until they come, the GPU fails, or the device is abandoned."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from trtc.protos.errors import EnvironmentFault
from trtc.runtime.device.driver_api import DriverRefusal
from trtc.runtime.executors.cuda.gpu_transfers import EventWaiter

EVENT = 0x5
FAILURE = DriverRefusal("cuEventQuery", "CUDA_ERROR_UNKNOWN", "unknown")


@dataclass
class StandInGpu:
    """Its event comes after it was asked for `queries_left` times; never, if that is None."""

    queries_left: int | None = None
    failure: Exception | None = None
    was_awaited: bool = False

    def await_event(self, event: int) -> None:
        assert event == EVENT
        if self.failure is not None:
            raise self.failure
        self.was_awaited = True

    def has_come(self, event: int) -> bool:
        assert event == EVENT
        if self.failure is not None:
            raise self.failure
        if self.queries_left is None:
            return False
        self.queries_left -= 1
        return self.queries_left < 0


def test_a_device_alone_leaves_the_waiting_to_the_driver() -> None:
    gpu: Any = StandInGpu()
    EventWaiter(gpu, is_rank=False).wait(EVENT)
    assert gpu.was_awaited


def test_a_rank_looks_until_its_event_has_come() -> None:
    gpu: Any = StandInGpu(queries_left=3)
    EventWaiter(gpu, is_rank=True).wait(EVENT)
    assert gpu.queries_left == -1
    assert not gpu.was_awaited


def test_a_rank_that_is_abandoned_stops_waiting() -> None:
    gpu: Any = StandInGpu()
    waiter = EventWaiter(gpu, is_rank=True)
    timer = threading.Timer(0.05, waiter.abandon)
    timer.start()
    with pytest.raises(EnvironmentFault, match="the GPU was abandoned") as caught:
        waiter.wait(EVENT)
    assert caught.value.remedy == "Restart the server"
    timer.join()


@pytest.mark.parametrize("is_rank", [False, True])
def test_a_failed_gpu_is_a_fault_of_the_environment(is_rank: bool) -> None:
    gpu: Any = StandInGpu(failure=FAILURE)
    with pytest.raises(EnvironmentFault, match="cuEventQuery failed: unknown") as caught:
        EventWaiter(gpu, is_rank=is_rank).wait(EVENT)
    assert caught.value is FAILURE
    assert "a new process" in caught.value.remedy
