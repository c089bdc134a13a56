"""The benchmark of calibration's memory: its checkpoints, and what it makes of steps."""

from pathlib import Path

import pytest
import torch

from examples.bench.calibration import Peak, StageTimes, host_peak, make_checkpoint, table
from examples.bench.gpu_shapes import LLAMA_70B
from trtc.protos.progress import Step
from trtc.quant.reference_model import load_model

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}


def test_checkpoints_load_and_keep_the_size_of_activations(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "made", LLAMA_70B | SMALL | HEADS)
    assert len(list((tmp_path / "made").glob("*.safetensors"))) == 4
    model = load_model(tmp_path / "made", "bfloat16")
    with torch.inference_mode():
        logits = model(torch.arange(32)[None]).logits
    assert 0.3 < float(logits.float().std()) < 3


def test_layers_are_timed_from_where_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 4.0, 8.0, 9.0, 9.5])
    monkeypatch.setattr("examples.bench.calibration.time.perf_counter", lambda: next(now))
    lines: list[str] = []
    times = StageTimes(lines.append)
    for done in (5, 6, 7):
        times(Step("calibrating", done, 7, "layers"))
    for done in (6, 7):
        times(Step("measuring", done, 7, "models"))
    times(Step("writing"))
    assert times.seconds == {"calibrating": (3.0, 4.0), "measuring": (0.5,)} and len(lines) == 6
    printed = table(times, 9.0, Peak(2_000_000_000))
    assert "calibrating: 2 layers of 7 in 7.0 s, median 3.50 s" in printed
    assert "measuring: 1 models of 7 in 0.5 s, median 0.50 s" in printed


def test_the_peak_counts_memory_that_is_gone_at_the_end() -> None:
    with host_peak() as peak:
        block = torch.ones(100_000_000, dtype=torch.uint8)
        while peak.num_bytes < block.nbytes:
            pass
        del block
    assert peak.num_bytes >= 100_000_000
