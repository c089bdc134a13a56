"""The source of a kernel: a specialisation of a Triton function, or of a CUDA C++ file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtc.plugins.gpu.arch import DEFAULT_SHARED_BYTES

CPP_TYPES: Mapping[str, str] = {
    "f32": "float",
    "bf16": "Bf16",
    "f8e4m3": "E4m3",
    "i8": "I8",
    "u8": "U4x2",
}
"""trtc -> the types of gpu/ptx.cuh, for macros that name one."""


DEFAULT_STAGES = 2
"""Of the loads that Triton pipelines, where a tactic names no number."""


@dataclass(frozen=True)
class KernelParameter:
    """A parameter of the entry: a tensor's address, or an i32 scalar."""

    name: str
    dtype: str
    """Name in protos/dtypes.py; of a tensor, that of its elements."""
    is_pointer: bool = True


@dataclass(frozen=True)
class KernelSource:
    """One specialisation of a Triton function."""

    function: Any
    """A `triton.jit` function: its parameters first, then its constants."""
    parameters: tuple[KernelParameter, ...]
    constants: Mapping[str, int | float | bool | str]
    num_warps: int = 4
    num_stages: int = DEFAULT_STAGES
    absent: tuple[str, ...] = ()
    """Optional parameters that are absent: None in this specialisation."""
    max_shared_bytes: int = DEFAULT_SHARED_BYTES
    """The most shared memory that it may take. Above DEFAULT_SHARED_BYTES, a launcher has to raise
    the function's limit (cuFuncSetAttribute)."""


@dataclass(frozen=True)
class CudaSource:
    """One specialisation of a CUDA C++ kernel, the counterpart of KernelSource."""

    file: str
    """Path under plugins/: `gemm/skinny.cu`."""
    entry: str
    """An `extern "C" __global__` function of it."""
    parameters: tuple[KernelParameter, ...]
    constants: Mapping[str, int | float | str]
    """Macros: every one is defined as given."""
    num_threads: int
    """Of a block, along x."""
    shared_bytes: int
    """Dynamic shared memory of a launch."""
