"""Run the Triton kernels on the CPU by Triton's interpreter, with numpy arrays."""

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.library_product import library_product
from tests.support.quick_interpreter import make_quick

Answer = TypeVar("Answer")
Array = NDArray[Any]

# numpy cannot hand these to torch: they travel as integers of the same width.
_BY_BITS: Mapping[np.dtype[Any], tuple[type[np.generic], torch.dtype]] = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
}
_FLOATS: Mapping[str, np.dtype[Any]] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""Triton's names."""
_BITS = {name: _FLOATS[name] for name in ("bf16", "fp8e4nv")}
"""Those that the interpreter holds as integers of the same width."""
_TORCH_TYPES: Mapping[str, torch.dtype] = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "i8": torch.int8,
    "i32": torch.int32,
}
INTERPRETED_SM = 80
"""The interpreter knows no griddepcontrol, and has E4M3 on every SM."""


def needs_triton() -> None:
    """Skip a test module where the TensorRT target's own environment is not installed."""
    pytest.importorskip("triton", reason="make test-cuda installs it", exc_type=ImportError)


@dataclass(frozen=True)
class Launch:
    """One launch of an operator's kernel. It crosses processes, so it names the kernel."""

    module: str
    """Under trtc.plugins, with a function `kernel`."""
    arguments: tuple[Any, ...]
    """Of that function."""
    grid: tuple[int, int, int]
    arrays: Mapping[str, Any]
    """By parameter name: arrays, and integers for scalars."""


@dataclass(frozen=True)
class Work:
    """The launches of a lowered call. It crosses processes, so it names the kernels by the site."""

    lower: str
    """`module:function`; called with `arguments` it gives variants, or launches by stage."""
    arguments: tuple[Any, ...]
    pick: int | str
    """Which of them."""
    bucket: Mapping[str, int]
    """Axis of a grid -> its length."""
    arrays: Mapping[str, Array]
    """By argument name: contiguous buffers, at whose start the argument begins."""


@functools.cache
def interpreting_process() -> ProcessPoolExecutor:
    """A process of its own: Triton decides at its import whether it interprets."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=set_interpreted)


def in_interpreter(work: Callable[..., Answer], *arguments: Any) -> Answer:
    """Call `work` (a module's function) in the process where Triton interprets its kernels."""
    return interpreting_process().submit(work, *arguments).result()


def set_interpreted() -> None:
    """Make this process interpret Triton kernels; before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Triton 3.7 asks int() of an array of one element, which numpy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_fma = _fma
    interpreter.InterpreterBuilder.binary_op = _binary
    cast = interpreter.InterpreterBuilder.cast_impl
    interpreter.InterpreterBuilder.cast_impl = lambda *arguments: _cast(cast, *arguments)
    _replace_assembly()
    make_quick()


def _replace_assembly() -> None:
    """The interpreter knows no inline assembly: a function of it, by what it computes."""
    from tests.support import plain_nibbles
    from trtc.plugins.gemm.triton import weights

    weights.bf16_nibbles = plain_nibbles.bf16_nibbles
    weights.bf16_iq4 = plain_nibbles.bf16_iq4
    weights.bf16_e2m1_codes = plain_nibbles.bf16_e2m1_codes
    weights.bf16_six = plain_nibbles.bf16_six
    weights.bf16_e2m1 = plain_nibbles.bf16_e2m1


def _convert_float(data: Array, source: Any, target: Any, rounding_mode: Any) -> Array:
    """Bits of `data` in another type, rounded to nearest even as the hardware does.

    Triton's own truncates bf16 and rounds ties away from zero. E4M3 without a clamp before it would
    come out as NaN here and as 448 there.
    """
    bits = np.dtype(f"uint{target.primitive_bitwidth}")
    return data.view(_FLOATS[source.name]).astype(_FLOATS[target.name]).view(bits)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of f32, rounded once: in f64 the product is exact."""
    from triton.runtime.interpreter import TensorHandle

    wide = x.data.astype(np.float64) * y.data + z.data
    return TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)


def _dot(
    self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    """a . b + d in one order of sums whatever the row: some machines' BLAS has several. Operands of
    tf32 are cut off, as GPUs do it."""
    from triton.runtime.interpreter import TensorHandle

    left, right = (_numbers(one).astype(d.data.dtype) for one in (a, b))
    if input_precision.name == "TF32" and d.data.dtype == np.float32:
        left, right = ((one.view(np.int32) & -0x2000).view(np.float32) for one in (left, right))
    products = left[..., :, :, None] * right[..., None, :, :]
    return TensorHandle(products.sum(axis=-2, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
    """An operation on numbers; Triton's own takes the bits of bf16 for integers."""
    from triton.runtime.interpreter import TensorHandle

    scalar, result = left.dtype.scalar, operation(_numbers(left), _numbers(right))
    if result.dtype != left.data.dtype and result.dtype != bool:
        if scalar.name in _BITS:
            result = result.astype(_BITS[scalar.name]).view(left.data.dtype)
        elif scalar.is_int():
            result = result.astype(left.data.dtype)
    return TensorHandle(result, scalar)


def _cast(cast: Any, self: Any, source: Any, target: Any) -> Any:
    """A conversion by way of f32, which holds all small integers, where the target is bf16."""
    from triton import language as tl

    if target.scalar == tl.bfloat16 and source.dtype.scalar.is_int():
        source = cast(self, source, tl.float32)
    return cast(self, source, target)


def _numbers(handle: Any) -> Array:
    """Of a tensor, whose type the interpreter may hold as bits; what a comparison gave keeps the
    type of what was compared."""
    data: Array = handle.data
    number = _BITS.get(handle.dtype.scalar.name)
    return data if number is None or data.dtype == bool else data.view(number)


def interpret(launch: Launch) -> dict[str, Array]:
    """Every array after the launch, by parameter name."""
    return in_interpreter(_interpret, launch)


def _interpret(launch: Launch) -> dict[str, Array]:
    module = importlib.import_module(f"trtc.plugins.{launch.module}")
    source = module.kernel(*launch.arguments)
    tensors = {name: _tensor(value) for name, value in launch.arrays.items()}
    arguments = [tensors[parameter.name] for parameter in source.parameters]
    source.function[launch.grid](*arguments, **source.constants)
    return {
        name: _array(tensors[name], value.dtype)
        for name, value in launch.arrays.items()
        if isinstance(value, np.ndarray)
    }


def interpret_work(work: Work) -> dict[str, Array]:
    """Every array after the launches, by argument name."""
    return in_interpreter(_interpret_work, work)


def _interpret_work(work: Work) -> dict[str, Array]:
    from trtc.plugins.gpu.lowering import Gemm
    from trtc.plugins.gpu.sources import CudaSource

    tensors = {name: _tensor(value) for name, value in work.arrays.items()}
    for name, num_bytes in scratch_of(work).items():
        tensors[f"scratch.{name}"] = _tensor(np.full(num_bytes, 0xFF, np.uint8))
    for launch in launches_of(work):
        if isinstance(launch, Gemm):
            _multiply(launch, work.arguments[0], tensors)
            continue
        grid = tuple(programs(extent, work.bucket) for extent in launch.grid)
        if isinstance(launch.kernel, CudaSource):
            _run_cuda(launch, grid, tensors)
            continue
        parameters = zip(launch.kernel.parameters, launch.arguments, strict=True)
        arguments = {one.name: _given(tensors[name], name, one.dtype) for one, name in parameters}
        if min(grid) > 0:
            absent = dict.fromkeys(launch.kernel.absent)
            # Nothing overlaps here, and the interpreter has no instructions for it.
            given = launch.kernel.constants
            constants = given | ({"OVERLAPS": False} if "OVERLAPS" in given else {})
            launch.kernel.function[grid](**arguments, **absent, **constants)
    return {name: _array(tensors[name], value.dtype) for name, value in work.arrays.items()}


def _given(tensor: Any, name: str, dtype: str) -> Any:
    """A kernel's argument; scratch is bytes, of which it makes elements."""
    return tensor.view(_TORCH_TYPES[dtype]) if name.startswith("scratch.") else tensor


def _run_cuda(launch: Any, grid: tuple[int, ...], tensors: Mapping[str, Any]) -> None:
    """A kernel in CUDA C++, whose copies to shared memory happen as late as may be."""
    from tests.support import cuda_on_cpu

    def array(name: str) -> Array:
        return tensors[name].view(torch.uint8).numpy()

    maps = [cuda_on_cpu.map_array(one, array(one.parameter)) for one in launch.maps]
    arguments = [*(array(name) for name in launch.arguments), *maps]
    cuda_on_cpu.launch(launch.kernel, arguments, grid, lazy=True)  # type: ignore[arg-type]


def _multiply(product: Any, site: Any, tensors: Mapping[str, Any]) -> None:
    """A GEMM of a site. Operands in scratch are bf16 without gaps."""

    def matrix(name: str, width: int) -> Any:
        if name.startswith("scratch."):
            return tensors[name].view(torch.bfloat16).reshape(-1, width)
        return tensors[name][:, :width]

    def vector(name: str) -> Any:
        return tensors[name] if name else None

    columns, depth = site.axes["N"], site.axes["K"]
    out = matrix(product.out, columns)
    library_product(
        out,
        matrix(product.x, depth)[: len(out)],
        matrix(product.weight, depth),
        input_scale=vector(product.input_scale),
        weight_scale=vector(product.weight_scale),
        residual=matrix(product.residual, columns)[: len(out)] if product.residual else None,
        bias=vector(product.bias),
        row_scale=tensors[product.row_scale][: len(out), 0] if product.row_scale else None,
    )


def scratch_of(work: Work) -> Mapping[str, int]:
    """Bytes of the buffers that the work names have of their own."""
    picked = _picked(work)
    return {} if isinstance(work.pick, str) else picked.scratch


def launches_of(work: Work) -> tuple[Any, ...]:
    """What the work names."""
    picked = _picked(work)
    launches: tuple[Any, ...] = picked if isinstance(work.pick, str) else picked.work
    return launches


def _picked(work: Work) -> Any:
    module, function = work.lower.split(":")
    return getattr(importlib.import_module(module), function)(*work.arguments)[work.pick]


def programs(extent: Any, bucket: Mapping[str, int]) -> int:
    """Length of an axis of a grid."""
    plus = bucket[extent.plus] if extent.plus else 0
    return int(extent.times * (-(-bucket[extent.axis] // extent.block) + plus))


def _tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype in _BY_BITS:
        bits, dtype = _BY_BITS[value.dtype]
        return torch.from_numpy(value.view(bits).copy()).view(dtype)
    return torch.from_numpy(value.copy())


def _array(tensor: Any, dtype: np.dtype[Any]) -> Array:
    if dtype in _BY_BITS:
        bits, _ = _BY_BITS[dtype]
        carrier = torch.int16 if bits is np.int16 else torch.uint8
        array: Array = tensor.view(carrier).numpy().view(dtype)
        return array
    plain: Array = tensor.numpy()
    return plain
