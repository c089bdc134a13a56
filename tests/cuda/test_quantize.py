"""gpu/quantize.cuh divides as IEEE 754 does."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.support.cuda_on_cpu import launch, poisoned
from trtc.plugins.gpu.sources import CudaSource, KernelParameter

KERNEL = """
#include "gpu/quantize.cuh"
using namespace trtc;
extern "C" __global__ void divide(const float* x, const float* by, float* out) {
  wait_for_earlier_kernels();
  const Divider divided(*by);
  for (int i = static_cast<int>(threadIdx.x); i < COUNT; i += 32) out[i] = divided(x[i]);
}
"""


@pytest.mark.parametrize("by", [1.0, 2.0**-6, 0.1, 3e-6, 0.0314159, 2900.0])
def test_a_divider_rounds_as_a_division_does(by: float, tmp_path: Path) -> None:
    file = tmp_path / "divide.cu"
    file.write_text(KERNEL)
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits[(bits & 0x7F80) != 0x7F80].view(ml_dtypes.bfloat16).astype(np.float32)
    scale, out = np.array([by], np.float32), poisoned(x.shape, np.float32)
    parameters = tuple(KernelParameter(name, "f32") for name in ("x", "by", "out"))
    source = CudaSource(
        str(file), "divide", parameters, {"COUNT": len(x)}, num_threads=32, shared_bytes=0
    )
    launch(source, [x, scale, out], (1, 1, 1), lazy=False)
    with np.errstate(over="ignore"):
        exact = x / scale
    seen = np.abs(exact) > 1e-29
    assert np.array_equal(out[seen], exact[seen])
    assert (np.abs(out[~seen]) <= 1e-29).all()
    assert np.array_equal(np.signbit(out), np.signbit(exact))
