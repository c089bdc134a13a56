"""CUDA C++ kernels to PTX and cubin for a named SM by NVRTC, on a machine without a GPU.

A kernel and the files that it includes (`#include "gpu/ptx.cuh"`: paths under plugins/) go to
NVRTC from memory, so neither the CUDA toolkit nor its headers are needed, and no path of this
machine gets into the code.
"""

import re
from pathlib import Path
from typing import Any

import trtc.plugins
from trtc.builder.targets.gpu.ptx import CompiledKernel, check_types, find_entry, ptx_directive
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.sources import CudaSource
from trtc.protos.errors import EnvironmentFault, InvariantError

NVRTC_VERSION = "13.0"
"""Of the wheel nvidia-cuda-nvrtc. It decides the code, and with it the oldest driver."""

_PLUGINS = Path(trtc.plugins.__file__).parent
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


def check_nvrtc() -> None:
    """Say that NVRTC is there, in the version whose code was tested.

    Raises:
        EnvironmentFault: it is not.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("cuda-bindings")
        found = version("nvidia-cuda-nvrtc")
    except PackageNotFoundError as missing:
        found = f"no {missing.name}"
    if not found.startswith(f"{NVRTC_VERSION}."):
        raise EnvironmentFault(
            f"kernels are compiled by nvidia-cuda-nvrtc {NVRTC_VERSION}, and this machine has "
            f"{found}",
            field="nvrtc",
            remedy="pip install 'trtc[cuda-build]'",
        )
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise EnvironmentFault(
            f"the library of nvidia-cuda-nvrtc cannot be loaded ({type(error).__name__})",
            field="nvrtc",
            remedy="Install it anew: pip install --force-reinstall nvidia-cuda-nvrtc, where Python "
            "keeps its packages or LD_LIBRARY_PATH finds them",
        ) from error


def compile_cuda(source: CudaSource, sm: int) -> CompiledKernel:
    """Cross-compile one specialisation.

    Raises:
        UnsupportedError: E4M3 on an SM without it.
        EnvironmentFault: NVRTC is missing, or of another version.
        InvariantError: NVRTC refuses the kernel, or the kernel spills registers, takes other
            parameters than declared, or wants more shared memory than a block may have.
    """
    check_types(source.parameters, sm)
    check_nvrtc()
    where = f"{source.file}: {source.entry} for sm_{sm}"
    macros = {**ARCHS[sm].macros, **source.constants}
    options = [
        f"--gpu-architecture={ARCHS[sm].cubin_target}",
        "--std=c++17",
        "--ptxas-options=--verbose",
        # From its cache, which it has where there is a driver, NVRTC answers without ptxas' log.
        "--no-cache",
        *(f"--define-macro={name}={value}" for name, value in macros.items()),
    ]
    text, cubin, log = _compile(source.file, options, where)
    _check_resources(log, source.shared_bytes, sm, where)
    _, declared, _ = find_entry(text, source.entry)
    if len(declared) != len(source.parameters):
        raise InvariantError(
            f"takes {len(declared)} parameters, not {len(source.parameters)}", field=where
        )
    return CompiledKernel(
        entry=source.entry,
        parameters=source.parameters,
        num_threads=source.num_threads,
        shared_bytes=source.shared_bytes,
        sm=sm,
        ptx_target=ptx_directive(text, "target"),
        ptx_version=ptx_directive(text, "version"),
        ptx=text.encode(),
        cubin=cubin,
    )


def included_files(file: str) -> dict[str, str]:
    """Text of every file that `file` includes, directly or not, by its path under plugins/."""
    found: dict[str, str] = {}
    waiting = [file]
    while waiting:
        for name in _INCLUDE.findall((_PLUGINS / waiting.pop()).read_text()):
            if name not in found:
                found[name] = (_PLUGINS / name).read_text()
                waiting.append(name)
    return dict(sorted(found.items()))


def _compile(file: str, options: list[str], where: str) -> tuple[str, bytes, str]:
    """(PTX, cubin, log)."""
    from cuda.bindings import nvrtc

    headers = included_files(file)
    program = _call(
        nvrtc.nvrtcCreateProgram(
            (_PLUGINS / file).read_bytes(),
            file.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        log = _string(_read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program))
        if int(status):
            raise InvariantError(f"NVRTC refuses the kernel: {log}", field=where)
        text = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return _string(text), cubin, log
    finally:
        _call(nvrtc.nvrtcDestroyProgram(program))


def _read(size: Any, get: Any, program: Any) -> bytes:
    count = _call(size(program))
    # NVRTC writes into the object, and Python shares those of one byte.
    buffer = bytes(count + 1)
    _call(get(program, buffer))
    return buffer[:count]


def _string(terminated: bytes) -> str:
    return terminated.rstrip(b"\0").decode().strip()


def _call(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    assert not int(status), status
    return values[0] if values else None


def _check_resources(log: str, shared_bytes: int, sm: int, where: str) -> None:
    """Everything must fit in registers and in shared memory, by what ptxas says."""
    local = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)
    if not local:
        raise InvariantError("NVRTC does not say what memory the kernel uses", field=where)
    if any(int(count) for count in local):
        raise InvariantError(f"uses local memory: {', '.join(local)} bytes", field=where)
    static_bytes = max((int(count) for count in re.findall(r"(\d+) bytes smem", log)), default=0)
    wanted, most = static_bytes + shared_bytes, ARCHS[sm].shared_bytes
    if wanted > most:
        raise InvariantError(f"wants {wanted} of {most} bytes of shared memory", field=where)
