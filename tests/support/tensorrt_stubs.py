"""Stub libraries, so that the real Python binding of TensorRT 11 imports without TensorRT.

The binding needs three libraries and nine C functions of them. Stubs that return null let it
import, describe itself and run its Python layer; builders and runtimes cannot be made.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
_NOT_NVIDIA = re.compile(r"@|^_?Py|^_Z|^dl(open|close|sym)$|^pthread")


def make_stubs(directory: Path) -> Path:
    """Write the stub libraries into `directory`; skips where the binding or a tool is missing."""
    spec = find_spec("tensorrt_bindings")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("make test-tensorrt installs the binding of TensorRT")
    compiler, nm = shutil.which("cc") or shutil.which("gcc"), shutil.which("nm")
    if compiler is None or nm is None:
        pytest.skip("stub libraries need a C compiler and nm")
    binding = Path(next(iter(spec.submodule_search_locations))) / "tensorrt.so"
    listing = subprocess.run(
        [nm, "-D", "--undefined-only", str(binding)], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split()[-1] for line in listing.splitlines() if line.split()[0] == "U"]
    wanted = [symbol for symbol in symbols if not _NOT_NVIDIA.search(symbol)]
    source = directory / "stub.c"
    for library in LIBRARIES:
        names = wanted if library == LIBRARIES[0] else []
        source.write_text("\n".join(f"void *{name}(void) {{ return 0; }}" for name in names) + "\n")
        subprocess.run(
            [compiler, "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", library, "stub.c"],
            cwd=directory,
            check=True,
        )
    return directory


def run_over_stubs(stubs: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """`python ARGUMENTS` in a process that finds the stubs."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"LD_LIBRARY_PATH": str(stubs)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
