"""C++ source to a shared object, kept in the temporary directory under a hash of what went in; and
headers that many sources begin with, compiled before."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path


def compile_shared_object(source: str, flags: Iterable[str], included: Iterable[str]) -> Path:
    """The library; `included` is the text of whatever the source may include.

    Raises:
        AssertionError: there is no compiler, or it refuses the source.
    """
    command = [_compiler(), *flags]
    digest = _digest([*command, source, *included])
    cache = _cache()
    library = cache / f"{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as work:
            (Path(work) / "kernels.cpp").write_text(source)
            _run([*command, "kernels.cpp", "-o", "kernels.so"], Path(work))
            (Path(work) / "kernels.so").rename(library)
    return library


def precompiled_header(name: str, text: str, flags: Sequence[str], included: Iterable[str]) -> Path:
    """A directory for -I, of sources whose first line includes the header `name` and which are
    compiled with the same flags. g++ takes what it compiled, other compilers the text.

    Raises:
        AssertionError: there is no compiler, or it refuses the header.
    """
    command = [_compiler(), *flags]
    home = _cache() / _digest([*command, name, text, *included])
    if not home.exists():
        with tempfile.TemporaryDirectory(dir=home.parent) as work:
            made = Path(work) / "made"
            made.mkdir()
            (made / name).write_text(text)
            _run([*command, "-x", "c++-header", name, "-o", f"{name}.gch"], made)
            with contextlib.suppress(OSError):  # another process was faster
                made.rename(home)
    return home


def _run(command: Sequence[str], directory: Path) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:8000]


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("TRTC_TESTS_CXX", "g++"))
    assert compiler is not None, "the kernel tests need a C++ compiler"
    return compiler


def _cache() -> Path:
    cache = Path(tempfile.gettempdir()) / f"trtc-kernels-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    return cache


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
