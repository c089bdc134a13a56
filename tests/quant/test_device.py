"""Where a model is calibrated: the choice alone, and, on a GPU host, what comes of it."""

from pathlib import Path

import pytest
import torch

from tests.support.torch_gpu import needs_torch_gpu
from tests.support.weight_bytes import WeightBytes, whole
from trtc.protos.progress import Step
from trtc.quant.calibrate import quantize_checkpoint
from trtc.quant.device import (
    Gpu,
    Placement,
    choose_device,
    on_best_device,
    peak_bytes,
    visible_gpus,
)
from trtc.quant.layer_source import WholeModel
from trtc.quant.scheme import scheme_named

GB = 1_000_000_000
SMALL, LARGE = Gpu("cuda:0", "small", 8 * GB), Gpu("cuda:1", "large", 80 * GB)
MODEL = Path(__file__).parents[2] / "examples" / "models" / "pyllama-draft"


def test_without_a_gpu_the_cpu_computes() -> None:
    assert choose_device(whole(GB), ()) == Placement("cpu", "CPU")


def test_the_gpu_with_most_room_is_taken() -> None:
    assert choose_device(whole(GB), (SMALL, LARGE)) == Placement("cuda:1", "large")
    assert choose_device(whole(GB), (LARGE, SMALL)) == Placement("cuda:1", "large")


def test_a_model_that_does_not_fit_stays_on_the_cpu_and_says_why() -> None:
    placement = choose_device(whole(70 * GB), (SMALL, LARGE))
    assert (placement.device, placement.name) == ("cpu", "CPU")
    assert str(placement) == "CPU (large has 80.0 GB free, and 89.6 GB are needed)"


def test_weights_alone_are_not_all_that_has_to_fit() -> None:
    assert choose_device(whole(8 * GB), (SMALL,)).device == "cpu"
    assert choose_device(whole(4 * GB), (SMALL,)).device == "cuda:0"
    assert choose_device(whole(4 * GB), (SMALL,), work_bytes=2 * GB).device == "cpu"
    assert choose_device(whole(4 * GB), (SMALL,), work_bytes=1 * GB).device == "cuda:0"


def test_weights_that_are_not_there_at_work_make_room_for_it() -> None:
    layered = WeightBytes(4 * GB, 1 * GB)
    assert choose_device(layered, (SMALL,), work_bytes=4 * GB).device == "cuda:0"
    assert choose_device(layered, (SMALL,), work_bytes=5 * GB).device == "cpu"
    assert choose_device(WeightBytes(6 * GB, 1 * GB), (SMALL,), work_bytes=GB).device == "cpu"


def test_what_is_held_beside_the_weights_at_other_times_counts_too() -> None:
    layered = WeightBytes(4 * GB, 1 * GB)
    assert peak_bytes(layered, 4 * GB, other_bytes=GB) == 5 * GB
    assert peak_bytes(layered, 4 * GB, other_bytes=2 * GB) == 6 * GB
    assert choose_device(layered, (SMALL,), 4 * GB, other_bytes=GB).device == "cuda:0"
    assert choose_device(layered, (SMALL,), 4 * GB, other_bytes=2 * GB).device == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_model_stays_where_it_is_without_a_gpu() -> None:
    model = torch.nn.Linear(2, 2)
    assert visible_gpus() == ()
    with on_best_device(WholeModel(model)) as placement:
        assert placement.device == "cpu" == model.weight.device.type
    assert model.weight.device.type == "cpu"


def pinned_bytes() -> int:
    """Of the CPU's memory that PyTorch keeps for copies of a GPU's."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["fp8", "fp8_dynamic", "int8_sq", "int4", "int4_awq", "w4a8_awq", "nvfp4"]
)
def test_calibration_runs_on_the_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same layers, as good as on the CPU, and the GPU's and pinned memory given back."""
    needs_torch_gpu()
    steps: list[Step] = []
    free, pinned = torch.cuda.mem_get_info()[0], pinned_bytes()
    there = quantize_checkpoint(
        MODEL, scheme_named(name), "bf16", None, tmp_path / "gpu", steps.append
    )
    assert there.device == torch.cuda.get_device_name()
    assert any(there.device in step.phase for step in steps)
    assert torch.cuda.mem_get_info()[0] > free - (1 << 30)
    assert pinned_bytes() <= pinned
    monkeypatch.setattr("trtc.quant.device.visible_gpus", lambda: ())
    here = quantize_checkpoint(
        MODEL, scheme_named(name), "bf16", None, tmp_path / "cpu", steps.append
    )
    assert here.device == "CPU" and len(here.layers) == len(there.layers)
    for ours, theirs in zip(here.layers, there.layers, strict=True):
        assert ours.layer == theirs.layer
        assert theirs.sqnr_db == pytest.approx(ours.sqnr_db, abs=1.0)
