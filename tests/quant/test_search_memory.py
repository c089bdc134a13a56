"""How much memory a search for recipes takes: a few layers of the checkpoint, and of its rounded
weights, not the whole."""

import os
import subprocess
import sys
from pathlib import Path

from tests.quant.test_memory import checkpoint

WIDE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
"""Of each layer, so that what a step works in counts for neither model."""

PEAK = """
import sys
from pathlib import Path
import numpy as np
import torch
from trtc.quant import gptq_layers, recipe_search, rounded_sites
from trtc.quant.calibration import CalibrationJob
from trtc.quant.calibration_text import TokenSet
from trtc.quant.gptq import Rounded
from trtc.quant.journal import Journals
from trtc.quant.layer_source import LayeredModel
from trtc.quant.recipe_search import RecipeSearch
from trtc.quant.scheme import Gptq
from trtc.quant.site_format import TABLES

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

def nearest(weight, inputs, group_size, settings, grid):
    # In no time; what counts here is where the results are.
    groups = weight.reshape(len(weight), -1, group_size)
    scales = (groups.abs().amax(-1) / grid.numbers[-1]).bfloat16().float()
    return Rounded(grid.round(groups / scales[..., None]).char().reshape(weight.shape), scales)

def search(source, directory):
    ids = np.random.default_rng(1).integers(3, 160, (1, 16), np.int32)
    tokens = TokenSet("ids", "", tuple(ids))
    model, journals = LayeredModel(source, "bfloat16"), Journals(directory)
    job = CalibrationJob(model, source, source, tokens, tokens, "", lambda step: None, journals)
    found = RecipeSearch(job, Gptq(asymmetric=True), TABLES)
    assert found.measure(found.path[0].recipe).error > 0
    files = [path.stat().st_size for path in directory.rglob("layer-*")]
    assert sum(files) > source.joinpath("model.safetensors").stat().st_size / 4, "rounded weights"

gptq_layers.round_weights = nearest
recipe_search.SEARCHED = rounded_sites.SEARCHED = ("iq4_g16", "int8", "bf16")
torch.set_num_threads(1)
few, many, output = map(Path, sys.argv[1:])
search(few, output / "of-few")
before = peak()
search(many, output / "of-many")
print(peak() - before)
"""


def test_a_few_layers_are_in_memory_at_once(tmp_path: Path) -> None:
    """A search of 12 takes hardly more than one of 2. Mapped files count, too."""
    few, many = (
        checkpoint(tmp_path / f"{layers}-layers", num_hidden_layers=layers, **WIDE)
        for layers in (2, 12)
    )
    command = [sys.executable, "-c", PEAK, str(few), str(many), str(tmp_path)]
    # As in tests/quant/test_memory.py.
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    environment = {**os.environ, **malloc}
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    taken = int(ran.stdout)
    stored = (many / "model.safetensors").stat().st_size
    assert stored > 50 << 20
    assert taken < 0.5 * stored, (taken, stored)
