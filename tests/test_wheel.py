"""The wheel, installed without extras and away from the sources, serves an engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.support import MODEL, serving
from tests.support.wheel import build_wheel
from trtc import build

BUILDER_PACKAGES = ("torch", "transformers", "onnx", "onnx_graphsurgeon", "modelopt", "ml_dtypes")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def runtime_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and what it depends on, nothing else."""
    home = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(home, {**os.environ, "PYTHONPATH": ""})
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv", cwd=home)
    python = home / "venv" / "bin" / "python"
    # Of all that is installed, few modules are imported: these are compiled then.
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-compile", wheel, cwd=home)
    return python


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "draft"
    build(MODEL.parent / "pyllama-draft", path, dtype="bf16", target="cpu", eval_tokens=0)
    return path


PROMPT = ("--prompt-ids", "5,17,9", "--max-tokens", "8", "--temperature", "0", "--json")


@pytest.mark.slow
def test_runtime_without_the_builder_gives_the_same_tokens(
    runtime_only: Path, engine: Path, tmp_path: Path
) -> None:
    script = f"""
import importlib.util
import trtc.cli
found = [name for name in {BUILDER_PACKAGES!r} if importlib.util.find_spec(name)]
assert not found, found
assert "site-packages" in trtc.cli.__file__, trtc.cli.__file__
from trtc.runtime.frontends.http.page.files import page_files
assert page_files().keys() >= {{"index.html", "style.css", "main.js", "icon.svg"}}
"""
    run(runtime_only, "-c", script, cwd=tmp_path)
    there = json.loads(run(runtime_only, "-m", "trtc", "generate", engine, *PROMPT, cwd=tmp_path))
    here = json.loads(run(sys.executable, "-m", "trtc", "generate", engine, *PROMPT, cwd=tmp_path))
    assert there["token_ids"] == here["token_ids"]
    assert len(there["token_ids"]) == 8


@pytest.mark.slow
def test_runtime_without_the_builder_serves(
    runtime_only: Path, engine: Path, tmp_path: Path
) -> None:
    with serving(engine, python=runtime_only) as address:
        port = address.rpartition(":")[2]
        client = (runtime_only, "-m", "trtc", "client", "--port", port)
        served = json.loads(run(*client, *PROMPT, cwd=tmp_path))
    local = json.loads(run(sys.executable, "-m", "trtc", "generate", engine, *PROMPT, cwd=tmp_path))
    assert served["token_ids"] == local["token_ids"]


@pytest.mark.slow
def test_building_without_the_builder_says_what_to_install(
    runtime_only: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [runtime_only, "-m", "trtc", "build", "--model", MODEL, "--output", tmp_path / "engine"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "trtc[build]" in done.stderr
    assert "Traceback" not in done.stderr
