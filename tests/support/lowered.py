"""Run what an operator is lowered to for a GPU, on the CPU, with the operands of a KernelCall."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tests.support.kernels import KernelCall
from tests.support.triton_kernels import INTERPRETED_SM, Work, interpret_work
from tests.support.weights import in_memory
from trtc.plugins.gpu.lowering import DIMS, Site
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.manifest import Limits

Array = NDArray[Any]
RowAxis = Literal["tokens", "rows"]
RunWork = Callable[[Work], Mapping[str, Array]]

_POISON = 0xFF  # NaN in every float format
_GUARD = 32  # poisoned elements after each row of an output
_SPLITS = 4  # of CUDA.keys, in the longest context
_STALE_ID = 1 << 30  # what step inputs hold after the last real row


def site_of(call: KernelCall, rows: RowAxis, sm: int) -> Site:
    """The site of a call whose outputs have _GUARD more elements a row."""
    types = call.types | call.output_types
    strides = {name: _stride(array) for name, array in call.inputs.items() if array is not None}
    for name in set(call.op.in_place.values()) & set(strides):
        strides[name] = math.prod(int(extent) for extent in call.types[name].shape[1:])
    for name, output in call.output_types.items():
        source = call.op.in_place.get(name)
        strides[name] = strides[source] if source else int(output.shape[-1]) + _GUARD
    axes = call.op.bind_axes(call.types, call.attributes)
    pool = types.get("pool")
    return Site(
        dtypes={name: tensor.dtype for name, tensor in types.items()},
        strides=strides,
        axes={name: int(n) for name, n in axes.items() if name not in call.op.row_axes},
        attributes=call.op.complete_attributes(call.attributes),
        rows=rows,
        page_size=int(pool.shape[2] if pool else call.attributes.get("page_size", 16)),
        limits=Limits(max_batch_size=64, max_seq_len=1024, max_num_tokens=1024),
        sm=sm,
    )


def run_lowered(
    call: KernelCall,
    *,
    rows: RowAxis = "tokens",
    stale: int = 3,
    variant: int = -1,
    run: RunWork = interpret_work,
    sm: int = INTERPRETED_SM,
    lower: str = "",
) -> dict[str, Array]:
    """The outputs of a call, from poisoned memory, in a bucket of `stale` rows more.

    Args:
        lower: "module:function" in place of the operator's own.

    Raises:
        AssertionError: a kernel wrote beside its outputs, or into their stale rows.
    """
    arrays = {
        name: _with_stale_rows(array, stale if _varies(call, name) else 0)
        for name, array in in_memory(call).inputs.items()
        if array is not None
    }
    site = site_of(call, rows, sm)
    new = [name for name in call.output_types if name not in call.op.in_place]
    for name in new:
        num_rows, dtype = int(call.output_types[name].shape[0]), NUMPY_DTYPES[site.dtypes[name]]
        num_bytes = site.strides[name] * dtype.itemsize
        arrays[name] = np.full((num_rows + stale, num_bytes), _POISON, np.uint8).view(dtype)
    for name, source in call.op.in_place.items():
        arrays[name] = arrays.pop(source)
    extents = {axis: int(n) for axis, n in call.op.bind_axes(call.types, call.attributes).items()}
    real = {
        "tokens": 999,
        "sequences": extents.get("B", 999),
        "rows": extents.get("R", 999),
        rows: extents["M"],
    }
    arrays[DIMS] = np.array([real["tokens"], real["sequences"], real["rows"], 0], np.int32)
    answers = run(
        Work(
            lower=lower or f"trtc.plugins.{call.op.name}.cuda:lower",
            arguments=(site,),
            pick=variant,
            bucket={axis: extent + stale for axis, extent in real.items()}
            | {"one": 1, "splits": _SPLITS},
            arrays=arrays,
        )
    )
    return {
        name: _checked(answers[name], call, name) if name in new else answers[name]
        for name in call.output_types
    }


def _varies(call: KernelCall, name: str) -> bool:
    """Whether an input's first axis is one of the step's, and may have stale rows."""
    axes = next(parameter.axes for parameter in call.op.inputs if parameter.name == name)
    return bool(axes) and axes[0] in ("M", "R")


def _with_stale_rows(array: Array, stale: int) -> Array:
    """A contiguous buffer that begins where `array` does and has its row stride; all else is
    poison, or ids that are out of any range."""
    if array.ndim != 2:
        after = np.full(stale, _STALE_ID, array.dtype) if stale else np.zeros(0, array.dtype)
        return np.concatenate((array.reshape(-1), after)).reshape(
            array.shape if array.ndim > 1 else -1
        )
    shape = (len(array) + stale, _stride(array) * array.itemsize)
    buffer = np.full(shape, _POISON, np.uint8).view(array.dtype)
    buffer[: len(array), : array.shape[1]] = array
    return buffer


def _stride(array: Array) -> int:
    if array.ndim == 2:
        return array.strides[0] // array.itemsize
    return array.shape[-1] if array.ndim else 1


def _checked(buffer: Array, call: KernelCall, name: str) -> Array:
    num_rows, num_columns = (int(extent) for extent in call.output_types[name].shape)
    for beside in (buffer[:, num_columns:], buffer[num_rows:]):
        untouched = np.ascontiguousarray(beside).view(np.uint8) == _POISON
        assert untouched.all(), f"{call.op.name}.{name} was written past its end"
    return np.ascontiguousarray(buffer[:num_rows, :num_columns])
