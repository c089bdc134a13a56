"""What a CUDA C++ kernel is: a file, an entry and its constants."""

from collections.abc import Mapping
from dataclasses import dataclass

from trtc.plugins.cuda.compile import KernelParameter

CPP_TYPES: Mapping[str, str] = {"f32": "float", "bf16": "Bf16", "f8e4m3": "E4m3", "i8": "I8"}
"""trtc -> the types of cuda/ptx.cuh, for macros that name one."""


@dataclass(frozen=True)
class CudaSource:
    """One specialisation of a CUDA C++ kernel, the counterpart of compile.KernelSource."""

    file: str
    """Path under plugins/: `linear/skinny.cu`."""
    entry: str
    """An `extern "C" __global__` function of it."""
    parameters: tuple[KernelParameter, ...]
    constants: Mapping[str, int | float | str]
    """Macros: every one is defined as given."""
    num_threads: int
    """Of a block, along x."""
    shared_bytes: int
    """Dynamic shared memory of a launch."""
