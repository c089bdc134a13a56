"""Compile CPU kernels for a test and call them with numpy arrays.

    library = compile_kernels([KernelCall(RMS_NORM, {...}, {...}), ...], "x86-64-v3")
    outputs = library.run(call, num_threads=2)

Kernels with the same sizes, attributes and element types share one instance, and all instances of
a library one shared object, which is kept in the temporary directory under a hash of everything
that went into it.
"""

import ctypes
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trtc.plugins
from tests.support.shared_objects import compile_shared_object, precompiled_header
from trtc.plugins.cpu.emit import config_struct
from trtc.plugins.cpu.host import runnable_isas
from trtc.plugins.cpu.isa import CXX_FLAGS, ISAS
from trtc.plugins.op import FusedOp, TensorType
from trtc.plugins.rounding import NUMPY_DTYPES

Array = NDArray[Any]
Attributes = Mapping[str, int | float | str]

PLUGINS = Path(trtc.plugins.__file__).resolve().parent
_DTYPE_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
_POISON = 0xFF  # NaN in every float format
_GUARD = 32  # poisoned elements after each row of an output, and rows after the last


@dataclass(frozen=True)
class KernelCall:
    """One call of an operator with real arrays."""

    op: FusedOp
    attributes: Attributes
    inputs: Mapping[str, Array | None]
    """By parameter; two-dimensional ones may be column slices of wider arrays."""
    optional_outputs: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Logical shapes of inputs that are stored otherwise: packed weights."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Element types of those."""

    @property
    def types(self) -> dict[str, TensorType]:
        return {
            name: TensorType(
                self.dtypes.get(name) or _DTYPE_NAMES[array.dtype],
                self.shapes.get(name, array.shape),
            )
            for name, array in self.inputs.items()
            if array is not None
        }

    @property
    def output_types(self) -> dict[str, TensorType]:
        inferred = self.op.infer_outputs(self.types, self.attributes)
        return {
            parameter.name: inferred[parameter.name]
            for parameter in self.op.outputs
            if not parameter.optional or parameter.name in self.optional_outputs
        }

    def config(self, name: str) -> str:
        """The C++ struct that specialises the kernel for this call."""
        return config_struct(
            name,
            self.op,
            axes=self.op.bind_axes(self.types, self.attributes),
            attributes=self.attributes,
            dtypes={name: t.dtype for name, t in (self.types | self.output_types).items()},
        )

    def reference(self) -> Mapping[str, Array]:
        """What the operator's reference gives for the present outputs; computed once, whichever
        kernels are compared with it."""
        return self._answers

    @functools.cached_property
    def _answers(self) -> Mapping[str, Array]:
        inputs = {parameter.name: self.inputs.get(parameter.name) for parameter in self.op.inputs}
        answers = self.op.reference(**inputs, **self.op.complete_attributes(self.attributes))
        named = zip((parameter.name for parameter in self.op.outputs), answers, strict=True)
        return {name: answer for name, answer in named if name in self.output_types}


class _View(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64))


class KernelLibrary:
    """A shared object with an instance of each kernel that its calls need."""

    def __init__(self, path: Path, symbols: Mapping[str, int]) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.pool_create.restype = ctypes.c_void_p
        self._symbols = symbols

    def run(
        self, call: KernelCall, num_threads: int = 1, *, only_largest: bool = False
    ) -> dict[str, Array]:
        """The outputs of one call, from poisoned memory.

        Args:
            only_largest: as Context has it.

        Raises:
            AssertionError: the kernel wrote beside its outputs.
        """
        number = self._symbols[call.config("C")]
        extents = self._extents(call)
        buffers: dict[str, Array] = {}
        views = (_View * len(call.op.parameters))()
        by_input = {source: output for output, source in call.op.in_place.items()}
        arrays = dict(call.inputs)
        for name, output in call.output_types.items():
            source = call.op.in_place.get(name)
            buffers[name] = _poisoned(output, arrays[source] if source else None)
        for view, parameter in zip(views, call.op.parameters, strict=True):
            array = buffers.get(by_input.get(parameter.name, parameter.name))
            array = array if array is not None else arrays.get(parameter.name)
            if array is not None:
                view.data = array.ctypes.data
                view.row_stride = _row_stride(array, is_pool=parameter.role == "pool")
        self._call(number, views, extents, num_threads, only_largest)
        return {
            name: _checked(buffers[name], output, f"{call.op.name}.{name}")
            for name, output in call.output_types.items()
        }

    def _extents(self, call: KernelCall) -> list[int]:
        axes = call.op.bind_axes(call.types, call.attributes)
        return [int(axes[axis]) for axis in call.op.row_axes]

    def _call(
        self,
        number: int,
        views: Any,
        extents: Sequence[int],
        num_threads: int,
        only_largest: bool,
    ) -> None:
        rows = (ctypes.c_int64 * len(extents))(*extents)
        scratch_of = self._library[f"scratch_{number}"]
        scratch_of.restype = ctypes.c_size_t
        scratch_bytes = scratch_of(ctypes.c_int64(extents[0]), ctypes.c_int(num_threads))
        memory = np.full(scratch_bytes + 128, _POISON, np.uint8)
        aligned = (memory.ctypes.data + 63) // 64 * 64
        pool = ctypes.c_void_p(self._library.pool_create(ctypes.c_int(num_threads)))
        try:
            self._library[f"run_{number}"](
                pool,
                ctypes.c_void_p(aligned),
                ctypes.c_size_t(scratch_bytes),
                views,
                rows,
                ctypes.c_bool(only_largest),
            )
        finally:
            self._library.pool_destroy(pool)
        beyond = memory[aligned - memory.ctypes.data + scratch_bytes :]
        assert (beyond == _POISON).all(), f"run_{number} wrote past its scratch area"


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this CPU runs, least first."""
    return tuple(reversed(runnable_isas()))


def compile_kernels(
    calls: Iterable[KernelCall], isa: str, optimization: str = "-O0"
) -> KernelLibrary:
    """Compile every kernel that `calls` need into one library.

    Args:
        optimization: tests/plugins/test_linear.py shows that it changes no bit.
    """
    operators: dict[str, str] = {}
    for call in calls:
        operators.setdefault(call.config("C"), call.op.name)
    by_name = {call.op.name: call.op for call in calls}
    source = "\n".join(
        [
            '#include "cpu/context.hpp"',
            *(f'#include "{name}/cpu.hpp"' for name in sorted(by_name)),
            "namespace trtc {",
            # Kernels that need no scratch declare none; an ellipsis loses to any declaration.
            *(
                f"template <class C> std::size_t {name}_scratch(...) {{ return 0; }}"
                for name in sorted(by_name)
            ),
            "}",
            'extern "C" void* pool_create(int n) { return new trtc::ThreadPool(n); }',
            'extern "C" void pool_destroy(trtc::ThreadPool* pool) { delete pool; }',
            *(
                _entry(number, config, by_name[name])
                for number, (config, name) in enumerate(operators.items())
            ),
        ]
    )
    symbols = {config: number for number, config in enumerate(operators)}
    return KernelLibrary(build(source, isa, optimization), symbols)


def _entry(number: int, config: str, op: FusedOp) -> str:
    views = [f"v[{slot}]" for slot in range(len(op.parameters))]
    extents = [f"n[{index}]" for index in range(len(op.row_axes))]
    name = f"C{number}"
    return f"""
namespace {{
{config.replace("struct C {", f"struct {name} {{", 1)}
}}
extern "C" std::size_t scratch_{number}(std::int64_t rows, int num_threads) {{
  return trtc::{op.name}_scratch<{name}>(rows, num_threads);
}}
extern "C" void run_{number}(trtc::ThreadPool* threads, std::byte* scratch, std::size_t bytes,
                             const trtc::View* v, const std::int64_t* n, bool only_largest) {{
  trtc::Context context{{*threads, scratch, bytes, only_largest}};
  trtc::{op.name}<{name}>(context, {{{", ".join(views + extents)}}});
}}"""


def build(source: str, isa: str, optimization: str = "-O0") -> Path:
    """Compile C++ source to a shared object for one instruction set."""
    flags = (*ISAS[isa].compiler_flags, optimization, "-Wall", "-Werror")
    arguments = [*CXX_FLAGS, *flags, f"-I{PLUGINS}"]
    if optimization == "-O0":
        # Most libraries are small: reading the headers takes longer than the rest.
        home = precompiled_header("kernels.hpp", _every_kernel(), arguments, _headers())
        source = f'#include "kernels.hpp"\n{source}'
        arguments.append(f"-I{home}")
    return compile_shared_object(source, arguments, _headers())


def _every_kernel() -> str:
    headers = (PLUGINS / "cpu" / "context.hpp", *sorted(PLUGINS.glob("*/cpu.hpp")))
    lines = [f'#include "{one.relative_to(PLUGINS)}"' for one in headers]
    return "\n".join(["#include <atomic>", "#include <memory>", *lines, ""])


@functools.cache
def _headers() -> tuple[str, ...]:
    return tuple(header.read_text() for header in sorted(PLUGINS.rglob("*.hpp")))


def _row_stride(array: Array, *, is_pool: bool) -> int:
    """Elements from one row to the next, of a pool from page to page; a whole row when there is but
    one axis."""
    if is_pool:
        return array.strides[0] // array.itemsize
    if array.ndim == 2:
        assert array.shape[1] <= 1 or array.strides[1] == array.itemsize
        return array.strides[0] // array.itemsize
    assert array.flags.c_contiguous
    return array.shape[-1] if array.ndim else 1


def _poisoned(output: TensorType, initial: Array | None) -> Array:
    """Memory for an output: poison, or a copy of the input whose memory it is, and guards."""
    dtype = NUMPY_DTYPES[output.dtype]
    shape = tuple(int(extent) for extent in output.shape)
    if initial is not None:
        return initial.copy()
    guarded = np.full((shape[0] + 1, (shape[1] + _GUARD) * dtype.itemsize), _POISON, np.uint8)
    return guarded.view(dtype)


def _checked(buffer: Array, output: TensorType, where: str) -> Array:
    if buffer.shape == output.shape:
        return buffer
    rows, columns = (int(extent) for extent in output.shape)
    beside = (buffer[:, columns:], buffer[rows:])
    assert all((np.ascontiguousarray(a).view(np.uint8) == _POISON).all() for a in beside), (
        f"{where} was written past its end"
    )
    return np.ascontiguousarray(buffer[:rows, :columns])


def assert_close(call: KernelCall, outputs: Mapping[str, Array]) -> None:
    """Compare with the reference within the operator's tolerance for its first output's type."""
    expected = call.reference()
    first = call.op.outputs[0].name
    tolerance = call.op.tolerances[call.output_types[first].dtype]
    for name, reference in expected.items():
        actual = outputs[name]
        assert actual.dtype == reference.dtype
        if np.array_equal(_bits(actual), _bits(reference)):
            continue
        difference = np.abs(actual.astype(np.float64) - reference.astype(np.float64))
        allowed = tolerance.absolute + tolerance.relative * np.abs(reference.astype(np.float64))
        wrong = ~(difference <= allowed) & ~(_bits(actual) == _bits(reference))
        assert not wrong.any(), (
            f"{call.op.name}.{name}: {wrong.sum()} of {wrong.size} values are wrong, the first at "
            f"{tuple(int(i[0]) for i in np.nonzero(wrong))}: {actual[wrong][0]} is not "
            f"{reference[wrong][0]}"
        )


def assert_writes_agree(call: KernelCall, outputs: Mapping[str, Array]) -> None:
    """The same of an operator with rows `q_out` that writes rows of a pool, and no others."""
    expected = call.reference()
    assert_close(call, {"q_out": outputs["q_out"], "pool_out": expected["pool_out"]})
    pool, expected_pool = outputs["pool_out"], expected["pool_out"]
    step = {"float32": 1e-5, "bfloat16": 1 / 64, "float8_e4m3fn": 1 / 8}[str(pool.dtype)]
    found, wanted = (p.astype(np.float32) for p in (pool, expected_pool))
    assert (np.abs(found - wanted) <= step * np.abs(wanted) + step).all()
    slots = call.inputs["slots"]
    assert slots is not None
    untouched = np.ones(pool.shape[0] * pool.shape[2], bool)
    untouched[slots] = False
    assert untouched.sum() == untouched.size - len(slots)
    flat = pool.reshape(-1, pool.shape[-1])[untouched]
    assert flat.tobytes() == expected_pool.reshape(-1, pool.shape[-1])[untouched].tobytes()


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")
