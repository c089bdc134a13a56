"""`trtc doctor` on this machine, and on machines that lack things."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from trtc.builder.targets.gpu.triton import TRITON_VERSION
from trtc.cli import main
from trtc.commands import doctor
from trtc.plugins.cpu.host import runnable_isas


def findings(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], dict[str, Any]]:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    return {(one["topic"], one["name"]): one for one in document["findings"]}


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(capsys)
    assert found["build", "compiler"]["verdict"] == "yes"
    assert found["run", "cpu:generic"]["verdict"] == "yes"
    best = found["run", f"cpu:{runnable_isas()[0]}"]
    assert (best["verdict"], best["detail"]) == ("yes", "the best here")
    assert found["runtime packages", "grpcio"]["verdict"] == "yes"
    assert found["abilities", "serve engines"]["verdict"] == "yes"
    assert found["run", "cuda"]["verdict"] == "no" or found["machine", "gpu"]["detail"] != "none"
    for topic in ("build", "run"):
        assert found[topic, "cuda"]["detail"]
        assert found[topic, "tensorrt"]["detail"]
    assert "docs/tensorrt.md" in found["unproven", "tensorrt plan"]["remedy"]


def test_the_table_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("machine", "compiler", "cpu:generic", "grpcio", "serve engines"):
        assert word in out


def test_tensorrt_needs_triton_libraries_and_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {
        "triton": TRITON_VERSION,
        "tensorrt-cu13": "11.4.0.106",
        "tensorrt-rtx-cu13": "1.7.1.116",
        "cuda-bindings": "13.5.0",
    }
    gpus = ["NVIDIA H200, 9.0, 144384 MiB"]
    monkeypatch.setattr(doctor, "_version", lambda package: versions.get(package, ""))
    monkeypatch.setattr(doctor, "_gpus", lambda: gpus)
    names = [
        ("build", "tensorrt"),
        ("build", "tensorrt plan"),
        ("build", "tensorrt-rtx"),
        ("run", "tensorrt"),
        ("run", "tensorrt-rtx"),
    ]
    found = findings(capsys)
    assert [found[name]["verdict"] for name in names] == ["yes"] * 5
    assert "sm_90" in found["build", "tensorrt"]["detail"]
    assert "sm_86" in found["build", "tensorrt-rtx"]["detail"]
    gpus.clear()
    found = findings(capsys)
    assert [found[name]["verdict"] for name in names] == ["yes", "no", "yes", "no", "no"]
    assert found["run", "tensorrt"]["detail"] == "needs an NVIDIA GPU"
    versions |= {"triton": "3.5.0", "tensorrt-cu13": "10.16.1", "cuda-bindings": ""}
    found = findings(capsys)
    assert found["build", "tensorrt"]["detail"] == f"needs triton {TRITON_VERSION} (finds 3.5.0)"
    assert found["build", "tensorrt plan"]["detail"] == "needs TensorRT 11 and an NVIDIA GPU"
    assert found["run", "tensorrt-rtx"]["detail"] == "needs cuda-bindings and an NVIDIA GPU"
    assert found["run", "tensorrt-rtx"]["remedy"].startswith("pip install 'trtc[tensorrt-rtx]'")


def test_a_torch_for_cuda_without_a_gpu_says_how_to_save_the_space(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Packages as pip leaves them: a torch that requires CUDA libraries, and one of those."""
    for name, size, requires in (
        ("torch", 10, ("sympy", "nvidia-cudnn-cu13==9.20.0.48")),
        ("nvidia-cudnn-cu13", 3 << 30, ()),
    ):
        info = tmp_path / f"{name.replace('-', '_')}-2.13.0.dist-info"
        info.mkdir()
        lines = [f"Name: {name}", "Version: 2.13.0", "Metadata-Version: 2.1"]
        lines += [f"Requires-Dist: {one}" for one in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "RECORD").write_text(f"{name}/library.so,sha256=abc,{size}\n")
    gpus: list[str] = []
    monkeypatch.setattr(doctor, "_gpus", lambda: gpus)
    key = ("build packages", "torch for CUDA")
    if importlib.metadata.version("torch").endswith("+cpu"):
        assert key not in findings(capsys)
    monkeypatch.syspath_prepend(tmp_path)
    found = findings(capsys)[key]
    assert found["detail"].startswith("there is no GPU here, and torch's CUDA libraries take")
    assert "--index-url https://download.pytorch.org/whl/cpu" in found["remedy"]
    assert "torch==2.13.0" in found["remedy"]
    gpus.append("NVIDIA H200, 9.0, 144384 MiB")
    assert key not in findings(capsys)


@pytest.mark.parametrize(
    ("version", "detail"),
    [
        (TRITON_VERSION, f"{TRITON_VERSION}, the supported version"),
        ("3.5.0", f"3.5.0: kernels are compiled by {TRITON_VERSION} only"),
        ("", "not installed"),
    ],
)
def test_which_triton_is_there(
    version: str, detail: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: version if name == "triton" else real(name)
    )
    assert findings(capsys)["gpu packages", "triton"]["detail"] == detail


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    found = findings(capsys)
    assert found["build", "compiler"]["verdict"] == "no"
    assert "apt-get install g++" in found["build", "compiler"]["remedy"]
    assert ("build", "cpu:generic") not in found
    assert found["run", "cpu:generic"]["verdict"] == "yes"


def test_without_the_builders_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("torch", "onnx"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = findings(capsys)
    assert found["build packages", "torch"]["remedy"] == "pip install 'trtc[build]'"
    for ability in ("build engines", "quantise checkpoints"):
        assert found["abilities", ability]["verdict"] == "no"
        assert found["abilities", ability]["detail"] == "missing: torch, onnx"
    assert found["abilities", "serve engines"]["verdict"] == "yes"


def test_on_a_processor_without_the_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "runnable_isas", lambda: ("generic",))
    monkeypatch.setattr(doctor, "read_cpu_flags", lambda: frozenset({"avx", "fma"}))
    found = findings(capsys)
    assert found["run", "cpu:x86-64-v3"]["verdict"] == "no"
    assert "lacks" in found["run", "cpu:x86-64-v3"]["detail"]
    assert "avx2" in found["run", "cpu:x86-64-v3"]["detail"]
    assert found["run", "cpu:generic"]["detail"] == "the best here"


def test_the_packages_it_looks_for_are_those_that_trtc_requires() -> None:
    """Names drift apart silently otherwise: a package would be reported by nobody."""
    required = importlib.metadata.requires("trtc") or []
    plain = {_name(line) for line in required if "extra ==" not in line}
    build = {_name(line) for line in required if "extra == 'build'" in line.replace('"', "'")}
    assert set(doctor.RUNTIME_PACKAGES) == plain
    assert set(doctor.BUILD_PACKAGES) <= build


def _name(requirement: str) -> str:
    for end, character in enumerate(requirement):
        if character in "<>=!~[; ":
            return requirement[:end]
    return requirement
