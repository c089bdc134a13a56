"""pip resolves all optional dependency sets together, so each too, on every supported Python.

The real pip asks the real package index, and reads metadata alone: nothing is installed, and wheels
are not downloaded (`fast-deps` reads the metadata out of them).
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.wheel import ROOT, build_wheel
from trtc.builder.targets.gpu.triton import TRITON_VERSION

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Mapping[str, Sequence[str]] = PROJECT["optional-dependencies"]
OLDEST, MIDDLE, NEWEST = "3.11", "3.12", "3.13"
FROM_NVIDIA = "tensorrt"
"""Its libraries are on NVIDIA's package index only."""
WITHOUT_NVIDIA = tuple(name for name in EXTRAS if name != FROM_NVIDIA)
NVIDIA_INDEX = "https://pypi.nvidia.com"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SOURCE_ONLY = ("tensorrt-rtx-cu13", "tensorrt-cu13")
"""Published as source distributions of a few kilobytes, which import their `-libs` packages."""
LIMIT_S = 500

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class Index:
    """Where pip looks."""

    name: str
    environment: Mapping[str, str]
    """Beside that of this process, from which pip's own settings are removed."""
    options: tuple[str, ...] = ()


def environment(index: Index) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PIP_") or name in ("PIP_CERT", "PIP_INDEX_URL", "PIP_PROXY")
    }
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **index.environment}


DEFAULT = Index("default", {"PIP_CONFIG_FILE": os.devnull})
"""The package index alone, without wheels that this machine offers besides."""


def pip(*arguments: str | Path, index: Index, limit_s: float = LIMIT_S) -> str:
    """pip's error output, "" when it succeeded."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), *index.options]
    try:
        done = subprocess.run(
            command,
            env=environment(index),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"pip did not end within {limit_s} s"
    return "" if done.returncode == 0 else done.stderr or f"status {done.returncode}"


def offers(index: Index, requirement: str) -> bool:
    """Whether an index answers, and has a wheel for a requirement."""
    with_deadline = ("--timeout", "10", "--retries", "0")
    arguments = ("install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps")
    lazily = ("--only-binary=:all:", "--use-feature=fast-deps")
    return not pip(*arguments, *lazily, *with_deadline, requirement, index=index, limit_s=60)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """trtc's own wheel, beside wheels of what is published as source only."""
    if not offers(DEFAULT, "click"):
        pytest.skip("no package index can be reached")
    home = tmp_path_factory.mktemp("wheels")
    build = ("wheel", "--quiet", "--no-deps", "-w", home)
    pinned = [
        line
        for name in (FROM_NVIDIA, "tensorrt-rtx")
        for line in EXTRAS[name]
        if line.partition("==")[0] in SOURCE_ONLY
    ]
    assert len(pinned) == len(SOURCE_ONLY)
    problem = pip(*build, *pinned, index=DEFAULT)
    assert not problem, problem
    return build_wheel(home, environment(DEFAULT))


def resolve(
    wheel: Path, extras: Sequence[str], python: str, index: Index, report: Path
) -> dict[str, str]:
    """Name -> version of every package that pip would install.

    Raises:
        AssertionError: the requirements contradict each other.
    """
    problem = pip(
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--use-feature=fast-deps",
        "--only-binary=:all:",
        f"--python-version={python}",
        f"--target={report.parent / 'nothing'}",
        f"--find-links={wheel.parent}",
        f"--report={report}",
        f"{wheel}[{','.join(extras)}]",
        index=index,
    )
    assert not problem, f"trtc[{','.join(extras)}] on Python {python}: {problem}"
    installed = json.loads(report.read_text())["install"]
    return {
        one["metadata"]["name"].lower().replace("_", "-"): one["metadata"]["version"]
        for one in installed
    }


@pytest.mark.parametrize("python", [OLDEST, NEWEST])
def test_every_extra_resolves_with_the_default_torch(
    wheel: Path, python: str, tmp_path: Path
) -> None:
    """All at once: what satisfies every set satisfies each."""
    together = resolve(wheel, WITHOUT_NVIDIA, python, DEFAULT, tmp_path / "all.json")
    assert together["triton"] == TRITON_VERSION
    assert together["torch"].partition("+")[0] == "2.13.0"
    assert "nvidia-cudnn-cu13" in together, "not the default torch"


def test_every_extra_resolves_with_a_torch_for_cpus(wheel: Path, tmp_path: Path) -> None:
    """On the Python between the two above: which Python it is, and which torch, are independent."""
    offering = (one for one in cpu_indexes() if offers_cpu_torch(one, MIDDLE, tmp_path))
    index = next(offering, None)
    found = resolve(wheel, WITHOUT_NVIDIA, MIDDLE, index or DEFAULT, tmp_path / "all.json")
    assert found["triton"] == TRITON_VERSION
    if index is None:
        pytest.skip(f"the default torch resolves; no index with one for CPUs and Python {MIDDLE}")
    assert found["torch"].endswith("+cpu")
    assert "nvidia-cudnn-cu13" not in found


def cpu_indexes() -> tuple[Index, ...]:
    """PyTorch's own, and what this machine's settings of pip add."""
    settings = {name: os.environ[name] for name in os.environ if name.startswith("PIP_")}
    return (
        Index("PyTorch's", DEFAULT.environment, ("--extra-index-url", CPU_INDEX)),
        Index("this machine's", settings),
    )


def offers_cpu_torch(index: Index, python: str, scratch: Path) -> bool:
    requirement = next(line for line in EXTRAS["build"] if line.startswith("torch=="))
    report = scratch / "torch.json"
    problem = pip(
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--use-feature=fast-deps",
        "--only-binary=:all:",
        f"--python-version={python}",
        f"--target={scratch / 'nothing'}",
        f"--report={report}",
        "--timeout=10",
        "--retries=0",
        requirement,
        index=index,
        limit_s=60,
    )
    if problem:
        return False
    (torch,) = json.loads(report.read_text())["install"]
    return bool(torch["metadata"]["version"].endswith("+cpu"))


def test_tensorrt_resolves_with_nvidias_index(wheel: Path, tmp_path: Path) -> None:
    index = Index("NVIDIA's", DEFAULT.environment, ("--extra-index-url", NVIDIA_INDEX))
    version = next(line for line in EXTRAS[FROM_NVIDIA] if line.startswith("tensorrt-cu13=="))
    libraries = version.replace("tensorrt-cu13", "tensorrt-cu13-libs")
    if not offers(index, libraries):
        pytest.skip(f"{NVIDIA_INDEX} cannot be reached")
    python = "{}.{}".format(*sys.version_info[:2])
    found = resolve(wheel, tuple(EXTRAS), python, index, tmp_path / "all.json")
    assert found["triton"] == TRITON_VERSION


def test_pip_refuses_what_contradicts_the_pinned_torch(wheel: Path, tmp_path: Path) -> None:
    """The check above can fail: another Triton beside the default torch does."""
    wrong = tmp_path / wheel.name
    with ZipFile(wheel) as right, ZipFile(wrong, "w") as out:
        for name in right.namelist():
            content = right.read(name)
            if name.endswith(".dist-info/METADATA"):
                pinned = f"triton=={TRITON_VERSION}".encode()
                assert pinned in content
                content = content.replace(pinned, b"triton==3.6.0")
            out.writestr(name, content)
    with pytest.raises(AssertionError, match="conflict"):
        resolve(wrong, ("build", "cuda-build"), OLDEST, DEFAULT, tmp_path / "none.json")
