"""Run CUDA C++ kernels on the CPU, thread by thread, with numpy arrays (see device.hpp)."""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trtc.plugins
from tests.support.shared_objects import compile_shared_object, precompiled_header
from trtc.plugins.gpu.lowering import TileMap
from trtc.plugins.gpu.sources import CudaSource

Array = NDArray[Any]

_PLUGINS = Path(trtc.plugins.__file__).resolve().parent
_HERE = Path(__file__).resolve().parent
_TENSOR_MAP = np.dtype(
    {
        "names": ["bytes", "sizes", "strides", "box"],
        "formats": ["u8", ("u4", 5), ("u8", 5), ("u4", 5)],
        "offsets": [0, 8, 32, 72],
        "itemsize": 128,
    }
)
_WARNINGS = ("-Wall", "-Wno-unknown-pragmas", "-Werror")
# Fortified, longjmp takes one to the stack of another fiber for an error.
_FLAGS = ("-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-fPIC", *_WARNINGS)
_FIRST = "first.hpp"
"""Of every program: device.hpp, which takes longer to read than a kernel."""
_DEVICE = ("device.cpp", "gpu/ptx.cpp", "gpu/hopper.cpp", "gpu/cluster.cpp")
"""All that does not depend on the kernel."""


class _Late(ctypes.Structure):
    """Late of device.hpp."""

    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def launch(
    source: CudaSource,
    arguments: Sequence[Array],
    grid: tuple[int, int, int],
    *,
    lazy: bool,
    late: Sequence[Array] = (),
) -> None:
    """One launch, writing into its arguments.

    Args:
        arguments: contiguous, or views at whose start a parameter begins.
        lazy: copies to shared memory happen when they are waited for, instead of at once.
        late: contiguous parts of the arguments that a kernel must not read before it has waited
            for the kernels before it.

    Raises:
        AssertionError: the kernel does not compile, or cannot end, or a block ends without having
            waited for the kernels before it.
    """
    library = ctypes.CDLL(str(compile_shared_object(_unit(source), _flags(), _files())))
    library.run.restype = ctypes.c_char_p
    places = [_Late(one.ctypes.data, one.nbytes) for one in late if one.size]
    failure = library.run(
        (ctypes.c_void_p * len(arguments))(*(one.ctypes.data for one in arguments)),
        (ctypes.c_uint * 3)(*grid),
        ctypes.c_int(source.num_threads),
        ctypes.c_int(lazy),
        (_Late * len(places))(*places),
        ctypes.c_int(len(places)),
    )
    assert failure is None, f"{source.entry}: {failure.decode()}"


def tile_map(
    address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> bytes:
    """A TensorMap of gpu/tensor_map.cuh here: five dimensions, the missing ones in the middle.

    Args: as those of protos/launch_plan.py's TileMap.
    """
    missing = 5 - len(sizes)

    def spread(values: Sequence[int], other: int) -> list[int]:
        return [*values[:-1], *([other] * missing), values[-1]]

    fields = np.zeros(1, _TENSOR_MAP)
    fields["bytes"] = address
    fields["sizes"], fields["box"] = spread(sizes, 1), spread(box, 1)
    fields["strides"] = spread((1, *strides), 0)
    return fields.tobytes()


def map_array(one: TileMap, parameter: Array) -> Array:
    """The map of an array, aligned as kernels take it."""
    content = tile_map(parameter.ctypes.data, one.sizes, one.strides, one.box)
    room = np.zeros(2 * len(content), np.uint8)
    begin = -room.ctypes.data % len(content)
    room[begin : begin + len(content)] = np.frombuffer(content, np.uint8)
    return room[begin : begin + len(content)]


def _unit(source: CudaSource) -> str:
    macros: Mapping[str, Any] = source.constants
    return "\n".join(
        [
            f'#include "{_FIRST}"',
            *(f"#define {name} {value}" for name, value in macros.items()),
            f"#define ENTRY {source.entry}",
            f'#include "{source.file}"',
            '#include "run.hpp"',
            "",
        ]
    )


@functools.cache
def _flags() -> tuple[str, ...]:
    """Of a kernel's program, which asks the library of _DEVICE for all else."""
    flags = (*_FLAGS, f"-I{_HERE}", f"-I{_PLUGINS}")
    text = "".join(f'#include "{name}"\n' for name in _DEVICE)
    device = compile_shared_object(text, (*flags, "-shared"), _files())
    first = precompiled_header(_FIRST, '#include "device.hpp"\n', flags, _files())
    return (*flags, "-shared", f"-I{first}", "-Wl,--no-as-needed", str(device))


@functools.cache
def _files() -> tuple[str, ...]:
    kernels = [*_PLUGINS.rglob("*.cu"), *_PLUGINS.rglob("*.cuh")]
    ours = [one for end in ("hpp", "cuh", "cpp") for one in _HERE.rglob(f"*.{end}")]
    return tuple(path.read_text() for path in sorted([*kernels, *ours]))


def poisoned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Memory that is NaN in every float format."""
    empty = np.empty(shape, dtype)
    empty.view(np.uint8)[...] = 0xFF
    return empty
