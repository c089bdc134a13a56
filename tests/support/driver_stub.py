"""A CUDA driver of host memory (libcuda.c), for programs that run over the real cuda-bindings."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.tensorrt_stubs import run_over_stubs

SOURCE = Path(__file__).parent / "libcuda.c"


def run_over_driver(directory: Path, module: str) -> dict[str, Any]:
    """The JSON document that `python -m MODULE` prints; skips where cuda-bindings are missing."""
    pytest.importorskip(
        "cuda.bindings", reason="make test-tensorrt installs it", exc_type=ImportError
    )
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the driver of host memory needs a C compiler")
    library = directory / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    result = run_over_stubs(directory, "-m", module)
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document
