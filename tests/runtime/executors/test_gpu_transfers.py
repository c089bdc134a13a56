"""Copies to a GPU whose streams run in any order that its events allow."""

import random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lazy_gpu import LazyGpu
from trtc.runtime.executors.cuda.device import Place
from trtc.runtime.executors.cuda.gpu_memory import GpuMemory
from trtc.runtime.executors.cuda.gpu_transfers import EventWaiter, GpuTransfers

WIDTH = 64


@given(
    seed=st.integers(0, 2**32),
    num_early=st.lists(st.integers(0, 6), min_size=1, max_size=8),
)
def test_every_step_reads_what_was_sent_for_it(seed: int, num_early: list[int]) -> None:
    """A step sends its block, runs layers that read a part of it, and gets other parts while they
    run. A slot of page-locked memory is used again and again."""
    gpu = LazyGpu(WIDTH * 7, random.Random(seed))
    stand_in: Any = gpu
    transfers = GpuTransfers(stand_in, EventWaiter(stand_in, is_rank=False))
    found: list[bytes] = []
    expected: list[bytes] = []

    def read(first: int, last: int) -> None:
        found.append(gpu.memory[first * WIDTH : last * WIDTH].tobytes())

    for step, early in enumerate(num_early):
        block = np.full(WIDTH * 7, 10 * step, np.uint8)
        transfers.send(block, Place(GpuMemory(0, len(block)), 0))
        gpu.run(lambda: read(0, 1))
        for part in range(1, 1 + early):
            block[part * WIDTH : (part + 1) * WIDTH] = 10 * step + part
            transfers.send_early(
                block[part * WIDTH : (part + 1) * WIDTH],
                Place(GpuMemory(0, len(block)), part * WIDTH),
            )
        gpu.run(lambda: read(1, 7))
        expected += [block[:WIDTH].tobytes(), block[WIDTH:].tobytes()]
        gpu.finish()  # a step is drawn once those before it are complete
    assert found == expected
