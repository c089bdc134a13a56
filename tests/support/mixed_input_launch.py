"""Run the CUDA C++ linears with integer weights on the CPU, thread by thread."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support import cuda_on_cpu
from tests.support.kernels import KernelCall
from tests.support.weights import in_memory
from trtc.plugins.gemm.mixed_input import few_variants
from trtc.plugins.gemm.mixed_input_tactics import Few
from trtc.plugins.gpu.lowering import DIMS, Launch, Site, Variant
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.rounding import NUMPY_DTYPES

Array = NDArray[Any]

_GUARD = 24
_STALE = 2


def run_few(
    call: KernelCall,
    site: Site,
    few: Few,
    *,
    lazy: bool,
    in_place: bool = False,
    beside: Mapping[str, Array] | None = None,
) -> Array:
    """`out` of mixed_input.cu with the tactic `few`: see run_linear."""
    return run_linear(
        call,
        site,
        lambda aligned: few_variants(aligned, [few]),
        lazy=lazy,
        in_place=in_place,
        beside=beside,
    )


def run_linear(
    call: KernelCall,
    site: Site,
    variants: Callable[[Site], Iterator[Variant]],
    *,
    lazy: bool,
    in_place: bool = False,
    beside: Mapping[str, Array] | None = None,
) -> Array:
    """`out` of the one launch that there is, in a bucket of _STALE rows more than the call's.

    Args:
        site: of the call, as the kernel has it; its strides do not matter.
        variants: of a site, a single one.
        lazy: copies to shared memory happen when they are waited for, instead of at once.
        in_place: the residual lies where `out` comes.
        beside: arguments that are not the call's.

    Raises:
        AssertionError: the kernel wrote beside its result.
    """
    rows, columns = (int(extent) for extent in call.output_types["out"].shape)
    site = replace(site, strides=_aligned_strides(site, columns))
    (variant,) = variants(site)
    (launch,) = variant.work
    assert isinstance(launch, Launch) and isinstance(launch.kernel, CudaSource)
    dtype = NUMPY_DTYPES[site.dtypes["out"]]
    out = cuda_on_cpu.poisoned((rows + _STALE, site.strides["out"]), dtype)
    arrays = {
        name: _with_stride(array, site.strides[name]) if name in ("x", "residual") else array
        for name, array in in_memory(call).inputs.items()
        if array is not None
    }
    arrays |= {"out": out, DIMS: np.array([rows, 0, 0, 0], np.int32), **(beside or {})}
    if in_place:
        out[:rows, :columns] = arrays["residual"][:rows, :columns]
    given = [np.ascontiguousarray(arrays[name]) for name in launch.arguments]
    if in_place:
        given[launch.arguments.index("residual")] = given[launch.arguments.index("out")]
    late = [
        array
        for name, array in zip(launch.arguments, given, strict=True)
        if name == "x" or (name == "residual" and not in_place)
    ]
    cuda_on_cpu.launch(launch.kernel, given, (launch.grid[0].times, 1, 1), lazy=lazy, late=late)
    out = given[launch.arguments.index("out")]
    untouched = [out[:, columns:], out[rows:]]
    assert all((np.ascontiguousarray(part).view(np.uint8) == 0xFF).all() for part in untouched)
    return np.ascontiguousarray(out[:rows, :columns])


def _aligned_strides(site: Site, columns: int) -> dict[str, int]:
    """Rows begin at multiples of 16 bytes."""
    strides = {"x": site.axes["K"] + 32, "out": columns + _GUARD}
    return {**strides, "residual": strides["out"]}


def _with_stride(array: Array, stride: int) -> Array:
    buffer = cuda_on_cpu.poisoned((len(array) + _STALE, stride), array.dtype)
    buffer[: len(array), : array.shape[1]] = array
    return buffer
