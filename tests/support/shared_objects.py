"""C++ source to a shared object, kept in the temporary directory under a hash of what went in."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path


def compile_shared_object(source: str, flags: Iterable[str], included: Iterable[str]) -> Path:
    """The library; `included` is the text of whatever the source may include.

    Raises:
        AssertionError: there is no compiler, or it refuses the source.
    """
    compiler = shutil.which(os.environ.get("TRTC_TESTS_CXX", "g++"))
    assert compiler is not None, "the kernel tests need a C++ compiler"
    command = [compiler, *flags]
    digest = hashlib.sha256("\0".join([*command, source, *included]).encode()).hexdigest()
    cache = Path(tempfile.gettempdir()) / f"trtc-kernels-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    library = cache / f"{digest[:32]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as work:
            (Path(work) / "kernels.cpp").write_text(source)
            done = subprocess.run(
                [*command, "kernels.cpp", "-o", "kernels.so"],
                cwd=work,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr[:8000]
            (Path(work) / "kernels.so").rename(library)
    return library
