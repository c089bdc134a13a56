"""Triton kernels to PTX and cubin for a named SM, on a machine without a GPU.

Triton gives every kernel two hidden trailing pointers (scratch memory). Kernels here may use none,
and the two are struck from the PTX before it is assembled: what is left takes exactly the declared
parameters, which is what TensorRT and `cuLaunchKernel` pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trtc.builder.targets.gpu.ptx import (
    CompiledKernel,
    assemble,
    check_types,
    ptx_directive,
    strip_hidden_parameters,
)
from trtc.builder.targets.gpu.triton_process import TritonProcess
from trtc.plugins.gpu.sources import KernelSource
from trtc.protos.errors import EnvironmentFault, InvariantError

TRITON_VERSION = "3.7.1"
"""The only supported version: the one that the pinned torch requires, so that one environment
builds every target. It decides the PTX, and with it the oldest driver; engines record it."""

_TRITON_TYPES: Mapping[str, str] = {
    "f32": "fp32",
    "bf16": "bf16",
    "f16": "fp16",
    "f8e4m3": "fp8e4nv",
    "i8": "i8",
    "u8": "u8",
    # Two a byte.
    "i4": "u8",
    "u4": "u8",
    "f4e2m1": "u8",
    "i32": "i32",
}


def check_triton(extra: str) -> None:
    """Check that Triton is installed in the supported version.

    Args:
        extra: the optional dependency set of trtc that installs it, for the remedy.

    Raises:
        EnvironmentFault: Triton is missing, or of another version.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("triton")
    except PackageNotFoundError:
        found = "none"
    if found != TRITON_VERSION:
        raise EnvironmentFault(
            f"kernels are compiled by triton {TRITON_VERSION}, and this machine has {found}",
            field="triton",
            remedy=f"pip install 'trtc[{extra}]'",
        )


def compile_kernel(source: KernelSource, sm: int) -> CompiledKernel:
    """Cross-compile one specialisation. Raises as `compile_kernels_in` does."""
    (kernel,) = compile_kernels((source,), sm)
    return kernel


def compile_kernels(sources: Sequence[KernelSource], sm: int) -> tuple[CompiledKernel, ...]:
    """Several, one after the other. Raises as `compile_kernels_in` does."""
    with TritonProcess() as triton:
        return compile_kernels_in(triton, sources, sm)


def compile_kernels_in(
    triton: TritonProcess, sources: Sequence[KernelSource], sm: int
) -> tuple[CompiledKernel, ...]:
    """Cross-compile several specialisations in a process that goes on.

    Raises:
        UnsupportedError: E4M3 on an SM without it.
        InvariantError: Triton refuses a kernel, or a kernel wants scratch, or more shared memory
            than its source allows.
    """
    for source in sources:
        check_types(source.parameters, sm)
    if not sources:
        return ()
    names = ", ".join(source.function.fn.__name__ for source in sources)
    answers = triton.ask([_request(source, sm) for source in sources], names)
    return tuple(_checked(*one, sm) for one in zip(sources, answers, strict=True))


def _checked(source: KernelSource, compiled: Mapping[str, Any], sm: int) -> CompiledKernel:
    entry, shared = compiled["entry"], compiled["shared_bytes"]
    if compiled["scratch_bytes"] or shared > source.max_shared_bytes:
        raise InvariantError(
            f"wants {compiled['scratch_bytes']} bytes of scratch, and {shared} of "
            f"{source.max_shared_bytes} of shared memory",
            field=f"{entry} for sm_{sm}",
        )
    ptx = strip_hidden_parameters(compiled["ptx"], entry, len(source.parameters))
    return CompiledKernel(
        entry=entry,
        parameters=source.parameters,
        num_threads=32 * compiled["num_warps"],
        shared_bytes=shared,
        sm=sm,
        ptx_target=ptx_directive(ptx, "target").split(",")[0],
        ptx_version=ptx_directive(ptx, "version"),
        ptx=ptx.encode(),
        cubin=assemble(ptx, sm),
    )


def _request(source: KernelSource, sm: int) -> dict[str, Any]:
    return {
        "module": source.function.fn.__module__,
        "function": source.function.fn.__name__,
        "signature": {
            p.name: f"*{_TRITON_TYPES[p.dtype]}" if p.is_pointer else _TRITON_TYPES[p.dtype]
            for p in source.parameters
        },
        "aligned": [p.name for p in source.parameters if p.is_pointer],
        "constants": dict(source.constants) | dict.fromkeys(source.absent),
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "sm": sm,
    }
