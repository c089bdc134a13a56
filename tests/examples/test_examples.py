"""Every example runs to its end and says what it should: the demo as it is, others with a smaller
model, which takes half the time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
@pytest.mark.parametrize("name", sorted(SAID))
def test_example(name: str) -> None:
    options = () if name == "demo" else ("--model", "examples/models/pyllama-draft")
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAID[name] in done.stdout
    assert "Traceback" not in done.stderr
