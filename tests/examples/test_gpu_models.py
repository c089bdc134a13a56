"""The check of several models on one GPU; here on the CPU, without its memory."""

from pathlib import Path

from examples.bench.gpu_models import run
from tests.support.engines import build_tiny
from tests.support.models import tiny_checkpoint


def test_models_come_sleep_wake_and_go_with_the_same_tokens(tmp_path: Path) -> None:
    engine = build_tiny(tiny_checkpoint("llama", tmp_path), tmp_path / "engine", "fp32").path
    checks = run(engine, tmp_path / "models", 1_000_000)
    assert checks.problems == []
    assert [one["step"] for one in checks.steps] == [
        "a is loaded",
        "b does not fit",
        "b is loaded",
        "b is unloaded",
        "before level 1",
        "level 1",
        "awake from level 1",
        "before level 2",
        "level 2",
        "awake from level 2",
    ]
    assert "b needs 1000000.00 GB of the host's memory" in checks.steps[1]["said"]
