"""Triton kernels to PTX and cubin for a named SM, on a machine without a GPU.

Triton gives every kernel two hidden trailing pointers (scratch memory). Kernels here may use none,
and the two are struck from the PTX before it is assembled: what is left takes exactly the declared
parameters, which is what TensorRT and `cuLaunchKernel` pass.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtc.protos.errors import EnvironmentFault, InvariantError, UnsupportedError

SMS: tuple[int, ...] = (80, 86, 89, 90, 100, 120)
"""Compute capabilities that kernels are compiled and tested for."""
RTX_SMS: tuple[int, ...] = (80, 86, 89, 120)
"""Those that TensorRT for RTX makes plans for."""
FP8_SMS: tuple[int, ...] = (89, 90, 100, 120)
"""Those that convert E4M3 in hardware."""
FP4_SMS: tuple[int, ...] = (100, 120)
"""Those that multiply E2M1 in hardware."""
MAX_SHARED_BYTES = 48 * 1024
"""What a launch may ask for without raising the function's limit first, on every SM."""
SHARED_BYTES: Mapping[int, int] = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
"""What a block may have at most, its launch's limit raised (cuFuncSetAttribute)."""
MULTIPROCESSORS: Mapping[int, int] = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 188}
"""Of each SM's data centre GPUs: work is cut for so many. With others some stand idle, or take two
blocks: no error."""
TRITON_VERSION = "3.6.0"
"""It decides the PTX, and with it the oldest driver: bundles say which made them."""

_HIDDEN_PARAMETERS = 2
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
    "i32": "i32",
}


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
    num_stages: int = 2
    absent: tuple[str, ...] = ()
    """Optional parameters of the function that this specialisation goes without: None in it."""
    max_shared_bytes: int = MAX_SHARED_BYTES
    """More only for launchers that raise the function's limit."""


@dataclass(frozen=True)
class CompiledKernel:
    """Code for one SM and how to launch it."""

    entry: str
    parameters: tuple[KernelParameter, ...]
    num_threads: int
    """Of a block, along x."""
    shared_bytes: int
    sm: int
    ptx_target: str
    """`sm_90a`: with the "a" it runs on this SM and on no later one."""
    ptx_version: str
    ptx: bytes
    cubin: bytes


def parse_sm(text: str) -> int:
    """`sm_90` -> 90.

    Raises:
        UnsupportedError: not an SM that kernels are compiled for.
    """
    known = {f"sm_{sm}": sm for sm in SMS}
    if text not in known:
        raise UnsupportedError(
            f"{text!r} is not an SM that trtc compiles kernels for",
            field="--target",
            remedy=f"Use one of {', '.join(known)}",
        )
    return known[text]


def check_triton() -> None:
    """Say that Triton is there, and the version whose PTX was tested.

    Raises:
        EnvironmentFault: it is not.
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
            remedy="pip install 'trtc[tensorrt-build]'",
        )


def compile_kernel(source: KernelSource, sm: int) -> CompiledKernel:
    """Cross-compile one specialisation.

    Raises:
        UnsupportedError: E4M3 on an SM without it.
        InvariantError: the kernel wants scratch, or more shared memory than its source allows.
    """
    check_types(source.parameters, sm)
    compiled = _triton(source, sm)
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


def strip_hidden_parameters(ptx: str, entry: str, num_parameters: int) -> str:
    """Strike the parameters after the first `num_parameters` from the entry.

    Raises:
        InvariantError: their number is not Triton's, or the code reads them.
    """
    begin, declared, end = find_entry(ptx, entry)
    hidden = declared[num_parameters:]
    rest = ptx[end:]
    names = [line.split()[-1] for line in hidden]
    if len(hidden) != _HIDDEN_PARAMETERS or any(re.search(rf"\b{n}\b", rest) for n in names):
        raise InvariantError(f"has {len(declared)} parameters, or reads a hidden one", field=entry)
    kept = ",\n\t".join(declared[:num_parameters])
    return f"{ptx[:begin]}\n\t{kept}\n{rest}"


def find_entry(ptx: str, entry: str) -> tuple[int, list[str], int]:
    """(begin of its parameters, the parameters as they are declared, their end).

    Raises:
        InvariantError: the PTX has no such entry.
    """
    match = re.search(rf"\.visible \.entry {re.escape(entry)}\((.*?)\n\)", ptx, re.DOTALL)
    if match is None:
        raise InvariantError("has no entry of that name", field=entry)
    declared = [line.strip().rstrip(",") for line in match[1].strip().splitlines()]
    return match.start(1), declared, match.end() - 1


def assemble(ptx: str, sm: int) -> bytes:
    """PTX -> cubin by the ptxas that comes with Triton.

    Raises:
        InvariantError: ptxas refuses it.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as scratch:
        source, output = Path(scratch) / "kernel.ptx", Path(scratch) / "kernel.cubin"
        source.write_text(ptx)
        target = ptx_directive(ptx, "target").split(",")[0]
        result = subprocess.run(
            [get_ptxas(sm).path, f"--gpu-name={target}", source.name, "-o", output.name],
            cwd=scratch,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise InvariantError(f"ptxas refuses the kernel: {result.stderr.strip()}")
        return output.read_bytes()


def check_types(parameters: tuple[KernelParameter, ...], sm: int) -> None:
    """Refuse element types that an SM cannot convert.

    Raises:
        UnsupportedError: E4M3 on an SM without it.
    """
    if sm not in FP8_SMS and any(p.dtype == "f8e4m3" for p in parameters):
        raise UnsupportedError(
            f"sm_{sm} has no E4M3 conversion",
            field="--target",
            remedy="Use a target from sm_89 on, or --dtype and --kv-dtype bf16",
        )


def _triton(source: KernelSource, sm: int) -> dict[str, Any]:
    """Run Triton in a process of its own; what plugins/cuda/worker.py answers.

    Triton 3.6 chooses some conversions by the first SM that a process compiles for: after sm_90,
    its code for sm_89 would not assemble, and the order of builds would show in their bytes.
    """
    request = {
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
    result = subprocess.run(
        [sys.executable, "-m", "trtc.plugins.cuda.worker"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InvariantError(f"Triton refuses the kernel: {reason}", field=request["function"])
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def ptx_directive(ptx: str, name: str) -> str:
    """What follows `.target` or `.version`."""
    match = re.search(rf"^\.{name} (.*)$", ptx, re.MULTILINE)
    assert match is not None, f"PTX without .{name}"
    return match[1].strip()
