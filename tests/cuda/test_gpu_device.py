"""The device by torch, on a GPU: copies there and back, graphs, and what outlives a capture."""

import gc

import numpy as np
import pytest

from trtc.runtime.executors.cuda.device import Place

pytestmark = pytest.mark.gpu

BYTES = 4096


@pytest.fixture(scope="module")
def device():  # type: ignore[no-untyped-def]
    from trtc.runtime.executors.cuda.torch_device import TorchDevice

    return TorchDevice()


def pattern(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, BYTES, np.uint8)


def test_downloads_keep_their_bytes_when_later_ones_land(device) -> None:  # type: ignore[no-untyped-def]
    memory = device.allocate(BYTES)
    found = []
    for seed in range(8):
        device.send(pattern(seed), Place(memory, 0))
        found.append(device.fetch(Place(memory, 0), BYTES))
    first = [download.wait() for download in found]
    device.send(pattern(99), Place(memory, 0))
    device.fetch(Place(memory, 0), BYTES).wait()
    for seed, (one, download) in enumerate(zip(first, found, strict=True)):
        np.testing.assert_array_equal(one, pattern(seed))
        np.testing.assert_array_equal(download.wait(), pattern(seed))


def test_garbage_of_steps_may_be_collected_while_a_graph_is_captured(device) -> None:  # type: ignore[no-untyped-def]
    source, target = device.allocate(BYTES), device.allocate(BYTES)
    device.send(pattern(1), Place(source, 0))
    device.wait()
    garbage = [device.fetch(Place(source, 0), BYTES) for _ in range(4)]
    garbage.append(garbage)  # a cycle, so that only the collector frees them

    def work() -> None:
        nonlocal garbage
        garbage = []
        gc.collect()
        device.copy(Place(source, 0), Place(target, 0), BYTES)

    graph = device.capture(work)
    device.send(pattern(2), Place(source, 0))
    graph.replay()
    for _ in range(4):
        np.testing.assert_array_equal(device.fetch(Place(target, 0), BYTES).wait(), pattern(2))
