"""The result of a GPU compiler: PTX, cubin, and the parameters of a launch."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.sources import KernelParameter
from trtc.protos.errors import InvariantError, UnsupportedError

_HIDDEN_PARAMETERS = 2
"""Of a kernel as Triton compiles it: see triton.py."""


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


def check_types(parameters: tuple[KernelParameter, ...], sm: int) -> None:
    """Refuse element types that an SM cannot convert.

    Raises:
        UnsupportedError: E4M3 on an SM without it.
    """
    if not ARCHS[sm].has_e4m3 and any(p.dtype == "f8e4m3" for p in parameters):
        raise UnsupportedError(
            f"sm_{sm} has no E4M3 conversion",
            field="--target",
            remedy="Use a target from sm_89 on, or --dtype and --kv-dtype bf16",
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


def ptx_directive(ptx: str, name: str) -> str:
    """What follows `.target` or `.version`."""
    match = re.search(rf"^\.{name} (.*)$", ptx, re.MULTILINE)
    assert match is not None, f"PTX without .{name}"
    return match[1].strip()
