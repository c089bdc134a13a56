"""`trtc doctor`: what this machine can build and run, and why not the rest.

It imports nothing heavy and changes nothing: packages are looked up by their metadata, compilers
are asked to check a small program, devices are only listed.
"""

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtc.builder.targets.cxx import Compiler, find_compiler
from trtc.builder.targets.gpu.nvrtc import NVRTC_VERSION
from trtc.builder.targets.gpu.triton import TRITON_VERSION
from trtc.plugins.cpu.host import read_cpu_flags, runnable_isas
from trtc.plugins.cpu.isa import ISAS
from trtc.plugins.gpu.arch import ARCHS, RTX_SMS
from trtc.protos.bundle import TENSORRT_MAJOR
from trtc.protos.errors import EnvironmentFault
from trtc.runtime.host.machine import available_bytes, num_usable_cores
from trtc.version import __version__

CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's package index of wheels without CUDA."""
NVIDIA_INDEX = "https://pypi.nvidia.com"
"""NVIDIA's package index, which alone has TensorRT's libraries."""

Verdict = Literal["yes", "no", "info"]
GIB = 1 << 30

RUNTIME_PACKAGES = (
    "click", "grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status",
    "httptools", "jinja2", "llguidance", "msgspec", "numpy", "prometheus-client", "protobuf",
    "rich", "safetensors", "tokenizers", "uvicorn",
)  # fmt: skip
BUILD_PACKAGES = (
    "torch", "transformers", "nvidia-modelopt", "onnx", "onnx-graphsurgeon", "ml_dtypes",
    "huggingface_hub",
)  # fmt: skip
GPU_PACKAGES = (
    "cuda-bindings", "nvidia-cuda-nvrtc", "tensorrt-cu13", "tensorrt-rtx-cu13", "triton",
)  # fmt: skip
_UNPROVEN = (
    "plans on a GPU were never seen by trtc's own tests: their kernel choice, speed, refitting, "
    "CUDA graphs",
    "On a GPU host: trtc compile BUNDLE, then trtc serve; what is proved without: docs/tensorrt.md",
)
"""What is wanting, and how it is proved."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool) -> None:
    """Say what this machine can build and run, and why not the rest."""
    findings = [finding for check in CHECKS for finding in check()]
    if as_json:
        document = {"trtc": __version__, "findings": [asdict(one) for one in findings]}
        click.echo(json.dumps(document))
    else:
        _show(findings)


def _machine() -> Iterator[Finding]:
    topic = "machine"
    cores = num_usable_cores()
    yield Finding(topic, "system", "info", f"{platform.system()} {platform.machine()}")
    yield Finding(topic, "python", "info", platform.python_version())
    yield Finding(topic, "cpu", "info", f"{_cpu_model()}, {cores} usable cores")
    yield Finding(topic, "memory", "info", f"{available_bytes() / GIB:.1f} GiB available")
    disk = shutil.disk_usage(Path.cwd())
    yield Finding(topic, "disk", "info", f"{disk.free / GIB:.1f} GiB free here")
    yield Finding(topic, "huge pages", "info", _huge_pages())


def _cpu_targets() -> Iterator[Finding]:
    """Each instruction-set level: can its code be compiled, and run, here?"""
    try:
        compiler = find_compiler()
    except EnvironmentFault as error:
        yield Finding("build", "compiler", "no", error.problem, error.remedy)
    else:
        yield Finding("build", "compiler", "yes", compiler.version)
        for isa in reversed(ISAS):
            yield _buildable(compiler, isa)
    runnable, flags = runnable_isas(), read_cpu_flags()
    for isa in reversed(ISAS):
        if isa in runnable:
            note = "the best here" if isa == runnable[0] else ""
            yield Finding("run", f"cpu:{isa}", "yes", note)
        else:
            lacks = ", ".join(sorted(ISAS[isa].cpu_flags - flags)) or "an x86-64 processor"
            yield Finding("run", f"cpu:{isa}", "no", f"the machine lacks {lacks}")


def _buildable(compiler: Compiler, isa: str) -> Finding:
    try:
        compiler.check(isa)
    except EnvironmentFault as error:
        return Finding("build", f"cpu:{isa}", "no", error.problem, error.remedy)
    return Finding("build", f"cpu:{isa}", "yes", "")


def _gpu_targets() -> Iterator[Finding]:
    """Bundles for TensorRT are built anywhere; the rest needs a GPU host."""
    driver = _nvidia_driver()
    gpus = _gpus()
    yield Finding("machine", "nvidia driver", "info", driver or "none")
    for gpu in gpus or ["none"]:
        yield Finding("machine", "gpu", "info", gpu)
    if not gpus:
        yield from _cuda_torch()
    yield from _cuda(has_gpu=bool(gpus))
    yield from _tensorrt(has_gpu=bool(gpus))


def _cuda_torch() -> Iterator[Finding]:
    """Without a GPU, torch's CUDA libraries only take space: builds never use them."""
    libraries = {name for name in map(_name, _requires("torch")) if name.startswith("nvidia-")}
    if not libraries:
        return
    installed = [one for one in importlib.metadata.distributions() if _is_of_cuda(one)]
    size = sum(file.size or 0 for one in installed for file in one.files or ())
    version = _version("torch").partition("+")[0]
    yield Finding(
        "build packages",
        "torch for CUDA",
        "info",
        f"there is no GPU here, and torch's CUDA libraries take {size / GIB:.1f} GiB",
        f"To save the space: in a new environment, pip install torch=={version} "
        f"--index-url {CPU_TORCH_INDEX}, then trtc with its extras",
    )


def _is_of_cuda(distribution: importlib.metadata.Distribution) -> bool:
    name = distribution.metadata["Name"] or ""
    return name.startswith("nvidia-") and name not in ("nvidia-modelopt", "nvidia-ml-py")


def _requires(package: str) -> list[str]:
    """What an installed package requires, as it declares it; [] where it is not installed."""
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0] if match else ""


def _cuda(*, has_gpu: bool) -> Iterator[Finding]:
    """Engines are compiled anywhere, and run where there is a GPU of their SM."""
    compilers = {"triton": TRITON_VERSION, "nvidia-cuda-nvrtc": NVRTC_VERSION, "cuda-bindings": ""}
    lacks = [
        f"{name} {wanted}".strip()
        for name, wanted in compilers.items()
        if not _version(name).startswith(wanted) or not _version(name)
    ]
    yield _target("build", "cuda", lacks, "pip install 'trtc[build,cuda-build]'")
    lacks = [name for name in ("cuda-bindings", "nvidia-cublas") if not _version(name)]
    lacks += [] if has_gpu else ["an NVIDIA GPU"]
    yield _target("run", "cuda", lacks, "pip install 'trtc[cuda]' on a machine with a GPU")


def _target(topic: str, name: str, lacks: list[str], remedy: str) -> Finding:
    if lacks:
        return Finding(topic, name, "no", f"needs {' and '.join(lacks)}", remedy)
    return Finding(topic, name, "yes", ", ".join(f"sm_{sm}" for sm in ARCHS))


def _tensorrt(*, has_gpu: bool) -> Iterator[Finding]:
    triton = _version("triton")
    lacks_triton = (
        "" if triton == TRITON_VERSION else f"triton {TRITON_VERSION} (finds {triton or 'none'})"
    )
    library = _version("tensorrt-cu13") or _version("tensorrt")
    lacks_library = "" if library.startswith(f"{TENSORRT_MAJOR}.") else f"TensorRT {TENSORRT_MAJOR}"
    lacks_rtx = "" if _version("tensorrt-rtx-cu13") else "tensorrt-rtx-cu13"
    lacks_driver = "" if _version("cuda-bindings") else "cuda-bindings"
    lacks_gpu = "" if has_gpu else "an NVIDIA GPU"
    for topic, name, lacks, detail, remedy in (
        (
            "build",
            "tensorrt",
            (lacks_triton,),
            f"bundles for {_sms(ARCHS)}",
            "pip install 'trtc[build,tensorrt-build]'",
        ),
        ("build", "tensorrt plan", (lacks_library, lacks_gpu), f"TensorRT {library}", ""),
        (
            "build",
            "tensorrt-rtx",
            (lacks_triton, lacks_rtx),
            f"engines for {_sms(RTX_SMS)}, without a GPU",
            "pip install 'trtc[build,tensorrt-build,tensorrt-rtx]'",
        ),
        (
            "run",
            "tensorrt",
            (lacks_library, lacks_driver, lacks_gpu),
            f"TensorRT {library}",
            f"pip install 'trtc[tensorrt]' --extra-index-url {NVIDIA_INDEX} on a GPU host",
        ),
        (
            "run",
            "tensorrt-rtx",
            (lacks_rtx, lacks_driver, lacks_gpu),
            f"on {_sms(RTX_SMS)}",
            "pip install 'trtc[tensorrt-rtx]' on a GPU host",
        ),
    ):
        missing = [one for one in lacks if one]
        if missing:
            yield Finding(topic, name, "no", f"needs {' and '.join(missing)}", remedy)
        else:
            yield Finding(topic, name, "yes", detail)
    yield Finding("unproven", "tensorrt plan", "info", *_UNPROVEN)


def _sms(sms: Iterable[int]) -> str:
    return ", ".join(f"sm_{sm}" for sm in sms)


def _packages() -> Iterator[Finding]:
    for topic, names, remedy in (
        ("runtime packages", RUNTIME_PACKAGES, "pip install trtc"),
        ("build packages", BUILD_PACKAGES, "pip install 'trtc[build]'"),
    ):
        for name in names:
            version = _version(name)
            yield Finding(
                topic,
                name,
                "yes" if version else "no",
                version or "not installed",
                "" if version else remedy,
            )
    for name in GPU_PACKAGES:
        version = _version(name)
        note = _triton_note(version) if name == "triton" and version else ""
        yield Finding("gpu packages", name, "info", (version or "not installed") + note)


def _triton_note(version: str) -> str:
    if version == TRITON_VERSION:
        return ", the supported version"
    return f": kernels are compiled by {TRITON_VERSION} only"


def _abilities() -> Iterator[Finding]:
    """The verdicts that the packages add up to."""
    for name, needs, remedy in (
        ("serve engines", RUNTIME_PACKAGES, "pip install trtc"),
        ("build engines", BUILD_PACKAGES, "pip install 'trtc[build]'"),
        ("quantise checkpoints", BUILD_PACKAGES, "pip install 'trtc[build]'"),
    ):
        missing = [package for package in needs if not _version(package)]
        yield Finding(
            "abilities",
            name,
            "no" if missing else "yes",
            f"missing: {', '.join(missing)}" if missing else "",
            remedy if missing else "",
        )


CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    _machine,
    _cpu_targets,
    _gpu_targets,
    _packages,
    _abilities,
)


def _version(package: str) -> str:
    """Installed version, "" when there is none; reads metadata, imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown processor"


def _huge_pages() -> str:
    facts = dict(line.split(":", 1) for line in _lines(Path("/proc/meminfo")) if ":" in line)
    free = facts.get("HugePages_Free", "0").strip()
    size = facts.get("Hugepagesize", "unknown size").strip()
    transparent = " ".join(_lines(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    return f"{free} free of {size}; transparent: {transparent or 'unknown'}"


def _nvidia_driver() -> str:
    for line in _lines(Path("/proc/driver/nvidia/version")):
        return line.strip()
    return ""


def _gpus() -> list[str]:
    """Name, compute capability and memory of each GPU, as nvidia-smi says."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi does not answer ({error})"]
    return [line.strip() for line in result.stdout.splitlines() if line.strip()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


_STYLES: dict[Verdict, str] = {"yes": "[green]yes[/]", "no": "[red]no[/]", "info": ""}


def _show(findings: Iterable[Finding]) -> None:
    by_topic: dict[str, list[Finding]] = {}
    for finding in findings:
        by_topic.setdefault(finding.topic, []).append(finding)
    console = Console()
    for topic, group in by_topic.items():
        table = Table(title=topic, title_justify="left", show_header=False, box=None)
        for one in group:
            detail = f"{one.detail}. {one.remedy}" if one.remedy else one.detail
            table.add_row(f"  {one.name}", _STYLES[one.verdict], escape(detail))
        console.print(table)
