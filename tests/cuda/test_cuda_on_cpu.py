"""What runs CUDA C++ kernels on the CPU finds their mistakes."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.cuda_on_cpu import launch, poisoned
from trtc.plugins.gpu.sources import CudaSource, KernelParameter

KERNEL = """
#include "gpu/hopper.cuh"
using namespace trtc;
extern "C" __global__ void copy(const float* x, float* out) {
  [[maybe_unused]] const unsigned mine = static_cast<unsigned>(threadIdx.x) * 16;
  %s
}
"""
COPY = "copy_async_16(mine, x + threadIdx.x * 4, 16); commit_copies();"
STORE = """
const uint4 words = load_shared(mine);
const unsigned four[4] = {words.x, words.y, words.z, words.w};
for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = __uint_as_float(four[i]);
"""
WAIT = "wait_for_earlier_kernels();"
LANDED = "wait_for_copies<0>();"


def run(body: str, directory: Path, *, lazy: bool = False, late: bool = False) -> bool:
    """Whether 32 threads copied 128 floats."""
    file = directory / "copy.cu"
    file.write_text(KERNEL % body)
    parameters = (KernelParameter("x", "f32"), KernelParameter("out", "f32"))
    source = CudaSource(str(file), "copy", parameters, {}, num_threads=32, shared_bytes=512)
    x, out = np.arange(128, dtype=np.float32), poisoned((128,), np.float32)
    launch(source, [x, out], (1, 1, 1), lazy=lazy, late=[x] if late else [])
    return np.array_equal(x, out)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_right_kernel_is_right_both_ways(lazy: bool, tmp_path: Path) -> None:
    assert run(WAIT + COPY + LANDED + STORE, tmp_path, lazy=lazy, late=True)


BARRIER = "if (threadIdx.x == 0) make_barrier(1024, 32); __syncthreads();"
ARRIVE = "arrive_when_copied(1024);"


@pytest.mark.parametrize("lazy", [False, True])
def test_copies_land_where_a_barrier_is_waited_at(lazy: bool, tmp_path: Path) -> None:
    assert run(WAIT + BARRIER + COPY + ARRIVE + "wait_at(1024, 0);" + STORE, tmp_path, lazy=lazy)


def test_copies_whose_barrier_is_not_waited_at_are_missing(tmp_path: Path) -> None:
    assert not run(WAIT + BARRIER + COPY + ARRIVE + STORE, tmp_path, lazy=True)


def test_copies_that_are_not_waited_for_are_missing(tmp_path: Path) -> None:
    assert not run(WAIT + COPY + STORE, tmp_path, lazy=True)


def test_what_earlier_kernels_write_is_missing_before_the_wait(tmp_path: Path) -> None:
    assert not run(COPY + LANDED + WAIT + STORE, tmp_path, late=True)


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (COPY + LANDED + STORE, "never waited for earlier kernels"),
        (WAIT + "sync_threads(1, 64);", "waits for ever"),
        (WAIT + "if (threadIdx.x > 0) __syncwarp();", "waits for ever"),
        (WAIT + "copy_async_16(mine, x + 1, 16);", "not aligned"),
        (WAIT + "return x;", "error"),
    ],
)
def test_what_cannot_end_or_compile_is_said(body: str, failure: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=failure):
        run(body, tmp_path)
