"""How much memory a checkpoint takes while it is calibrated and compared: a few layers of it, not
the whole."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.support.models import tiny_config

WIDE = {"hidden_size": 256, "intermediate_size": 4096, "head_dim": 64}
"""Of each layer, so that what a step works in counts for neither model."""

PEAK = """
import sys
from pathlib import Path
import numpy as np
import torch
from trtc.quant.calibration import CalibrationJob
from trtc.quant.calibration_text import TokenSet
from trtc.quant.gptq_calibrator import GptqCalibrator
from trtc.quant.layer_source import LayeredModel
from trtc.quant.linears import linear_shapes
from trtc.quant.modelopt_ptq import ModeloptCalibrator
from trtc.quant.reference_logits import reference_logits
from trtc.quant.scheme import SCHEMES
from trtc.quant.site_format import BF16, FORMATS

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

def calibrator(scheme, source):
    names = list(linear_shapes(source))
    kept = [name for name in names if not name.endswith("q_proj")]
    if scheme != "int4":
        return ModeloptCalibrator(SCHEMES[scheme], "f8e4m3", tuple(kept))
    formats = {name: BF16 if name in kept else FORMATS["int4_g128"] for name in names}
    return GptqCalibrator(SCHEMES[scheme].calibration, "bf16", formats)

def calibrate(scheme, source, output):
    output.mkdir()
    ids = np.random.default_rng(1).integers(3, 160, (2, 8), np.int32)
    tokens = TokenSet("ids", "", tuple(ids))
    model = LayeredModel(source, "bfloat16")
    job = CalibrationJob(model, source, output, tokens, tokens, "", lambda step: None)
    calibrator(scheme, source).run(job)
    list(reference_logits(source, ids))

scheme = sys.argv[1]
few, many, output = map(Path, sys.argv[2:])
calibrate(scheme, few, output / "of-few")
before = peak()
calibrate(scheme, many, output / "of-many")
print(peak() - before)
"""


def checkpoint(path: Path, **overrides: Any) -> Path:
    """A random llama in bf16, made faster than `tiny_checkpoint` makes one."""
    config = tiny_config("llama", **overrides)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    with torch.device("meta"):
        shapes = {
            name: one.shape
            for name, one in transformers.LlamaForCausalLM(config).named_parameters()
        }
    noise = torch.randn(max(shape.numel() for shape in shapes.values()), dtype=torch.bfloat16) / 32
    weights = {name: noise[: shape.numel()].view(shape).clone() for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One of 2 layers, and one of 20."""
    directory = tmp_path_factory.mktemp("checkpoints")
    few, many = (
        checkpoint(directory / f"{layers}-layers", num_hidden_layers=layers, **WIDE)
        for layers in (2, 20)
    )
    return few, many


@pytest.mark.parametrize("scheme", ["int4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_few_layers_are_in_memory_at_once(
    scheme: str, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """20 are calibrated with hardly more than 2. Mapped files count, too."""
    command = [sys.executable, "-c", PEAK, scheme, *map(str, checkpoints), str(tmp_path)]
    # Tensors that were freed go back to the system, whichever thread had them and however large
    # those before were: what malloc keeps of them took 60 to 130 MB more.
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    environment = {**os.environ, **malloc}
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    taken = int(ran.stdout)
    stored = (checkpoints[1] / "model.safetensors").stat().st_size
    assert stored > 125 << 20
    assert taken < stored / 2, (taken, stored)
