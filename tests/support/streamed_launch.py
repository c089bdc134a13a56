"""streamed.cu's launches: compiled, and run on the CPU with tensor maps as the runtime's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.cuda_on_cpu import launch as launch_on_cpu
from tests.support.cuda_on_cpu import map_array, poisoned
from trtc.builder.targets.gpu.ptx import CompiledKernel
from trtc.plugins.gemm.streamed import Cut
from trtc.plugins.gpu.lowering import DIMS, Launch
from trtc.plugins.gpu.sources import CudaSource

Array = NDArray[Any]


def compile_streamed(launched: Launch) -> CompiledKernel:
    """For sm_90: WGMMA fed by TMA, a block an SM."""
    from trtc.builder.targets.gpu.nvrtc import compile_cuda

    assert isinstance(launched.kernel, CudaSource)
    kernel = compile_cuda(launched.kernel, 90)
    for instruction in (b"wgmma", b"cp.async.bulk.tensor.5d", b"griddepcontrol.wait"):
        assert instruction in kernel.ptx
    assert launched.grid[0].times <= 132
    return kernel


def stale_rows(x: Array, rows: int, stride: int) -> Array:
    """A buffer for so many rows, of which the first are x."""
    buffer = poisoned((rows, stride), x.dtype)
    buffer[: len(x), : x.shape[1]] = x
    return buffer


def run_streamed(
    launched: Launch,
    cut: Cut,
    inputs: Mapping[str, Array | None],
    columns: int,
    *,
    out: np.dtype[Any],
    strides: Mapping[str, int],
    lazy: bool = False,
) -> Array:
    """`out`, from poisoned memory; rows after the real ones are stale and must stay."""
    source, x = launched.kernel, inputs["x"]
    assert isinstance(source, CudaSource) and x is not None
    stale, result = (
        stale_rows(x, cut.rows, strides["x"]),
        poisoned((len(x) + 1, strides["out"]), out),
    )
    arrays = {**inputs, "x": stale, DIMS: np.array([len(x), 0, 0, 0], np.int32)}
    scales = inputs.get("row_scale")
    if scales is not None:
        arrays["row_scale"] = stale_rows(scales, cut.rows, 1)
    given = [np.ascontiguousarray(arrays[name]) for name in launched.arguments if name != "out"]
    given.insert(launched.arguments.index("out"), result)
    launch_on_cpu(
        source,
        [*given, *(map_array(one, arrays[one.parameter]) for one in launched.maps)],
        (launched.grid[0].times, 1, 1),
        lazy=lazy,
        late=[stale],
    )
    untouched = poisoned(result.shape, result.dtype)
    untouched[: len(x), :columns] = result[: len(x), :columns]
    assert result.tobytes() == untouched.tobytes(), "written beside the result"
    return result[: len(x), :columns]
