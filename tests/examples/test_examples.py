"""Every example runs to its end and says what it should, with the smaller of the bundled models, in
this process, which has imported what they import."""

import runpy
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
@pytest.mark.parametrize("name", sorted(SAID))
def test_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRTC_TESTS_CXX_LEVEL", "-O1")
    monkeypatch.setattr(sys, "argv", [name, "--model", "examples/models/pyllama-draft"])
    monkeypatch.setattr(support, "trtc", command)
    runpy.run_module(f"examples.{name}", run_name="__main__")
    said = capsys.readouterr()
    assert SAID[name] in said.out
    assert "Traceback" not in said.err


def test_the_larger_model_is_what_examples_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `--model`: as the demo builds it, but for its calibration and its measurement."""
    monkeypatch.setattr(sys, "argv", ["demo"])
    model = support.chosen_model()
    assert model == ROOT / "examples" / "models" / "pyllama"
    command(
        "build", "--model", model, "--dtype", "fp8", "--output", tmp_path / "engine", "--dry-run"
    )
    assert "fp8" in capsys.readouterr().out


def command(*arguments: str | Path) -> None:
    """Runs a `trtc` command in this process, as `examples.support.trtc` does in another."""
    words = [*map(str, arguments)]
    print(f"$ trtc {' '.join(words)}")  # noqa: T201 (as the example shows it)
    assert main(words) == 0
