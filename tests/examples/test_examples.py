"""Every example runs to its end and says what it should: the demo as it is, others with a smaller
model, in this process, which has imported what they import."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from examples import support
from trtc.cli import main

ROOT = Path(__file__).parent.parent.parent

SAID = {
    "demo": "The demo is done",
    "build_and_generate": "KL to the unquantised model",
    "async_clients": "15 ",
    "quantize_then_build": "$ trtc generate",
}


def test_every_example_is_run() -> None:
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__", "support"}
    assert scripts == set(SAID)


@pytest.mark.slow
def test_the_demo() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={**os.environ, "COLUMNS": "120", "TRTC_TESTS_CXX_LEVEL": "-O1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAID["demo"] in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*SAID} - {"demo"}))
def test_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, "--model", "examples/models/pyllama-draft"])
    monkeypatch.setattr(support, "trtc", command)
    runpy.run_module(f"examples.{name}", run_name="__main__")
    said = capsys.readouterr()
    assert SAID[name] in said.out
    assert "Traceback" not in said.err


def command(*arguments: str | Path) -> None:
    """Runs a `trtc` command in this process, as `examples.support.trtc` does in another."""
    words = [*map(str, arguments)]
    print(f"$ trtc {' '.join(words)}")  # noqa: T201 (as the example shows it)
    assert main(words) == 0
