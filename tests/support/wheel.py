"""trtc's own wheel, built from these sources."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")


def build_wheel(home: Path, environment: Mapping[str, str] | None = None) -> Path:
    """Build it in a copy of the sources: setuptools writes beside them, and so would another test.

    Args:
        environment: of pip; this process's by default.

    Returns:
        Its path, in `home`.
    """
    source = home / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=_NOT_SOURCE)
    command: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    here = "--no-build-isolation"  # by this environment's setuptools: none is installed for it
    done = subprocess.run(
        [*command, here, "-w", home, source],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    (wheel,) = home.glob("trtc-*.whl")
    return wheel
