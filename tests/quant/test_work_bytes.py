"""How much memory a calibration is expected to take."""

import json
from pathlib import Path

import pytest

from tests.support.weight_bytes import WeightBytes
from trtc.quant.calibrate import _planned
from trtc.quant.device import Gpu, choose_device
from trtc.quant.scheme import SCHEMES
from trtc.quant.search_size import search_size
from trtc.quant.site_format import TABLES

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
OUTSIDE = 2 * 128256 * 8192 * 2
LAYER = (2 * 8192 + 2 * 1024 + 3 * 28672) * 8192 * 2
WEIGHTS = WeightBytes(OUTSIDE, LAYER)
"""Its embeddings and lm_head are more than a layer, and not there while layers are."""


def checkpoint(directory: Path, layers: int) -> Path:
    config = {**LLAMA_70B, "num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("scheme", ["fp8", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4", "int4"])
@pytest.mark.parametrize("layers", [2, 80])
def test_70b_is_calibrated_on_a_gpu_of_24_gb(scheme: str, layers: int, tmp_path: Path) -> None:
    checkpoint(tmp_path, layers)
    work = _planned(tmp_path, SCHEMES[scheme], "f8e4m3", ()).calibrator.work_bytes(tmp_path)
    assert choose_device(WEIGHTS, (Gpu("cuda:0", "", 24 * 10**9),), work).device == "cuda:0"
    assert choose_device(WEIGHTS, (Gpu("cuda:0", "", 8 * 10**9),), work).device == "cpu"


@pytest.mark.parametrize("layers", [2, 80])
def test_recipes_of_70b_are_searched_for_on_a_gpu_of_24_gb(layers: int, tmp_path: Path) -> None:
    size = search_size(checkpoint(tmp_path, layers), TABLES, 16_384)
    work = (size.memory, size.others)
    assert choose_device(WEIGHTS, (Gpu("cuda:0", "", 24 * 10**9),), *work).device == "cuda:0"
    assert choose_device(WEIGHTS, (Gpu("cuda:0", "", 16 * 10**9),), *work).device == "cpu"


def test_a_search_counts_its_tables_and_their_logits(tmp_path: Path) -> None:
    """Codes of one table in four formats, or its values beside kept log-probabilities."""
    table, logits = 128256 * 8192, 512 * 128256 * 4
    scales = 4 * table * (1 / 32 + 1 / 16 + 2 / 128)
    size = search_size(checkpoint(tmp_path, 2), TABLES, 16_384)
    assert size.others > 4 * table + scales + 5 * logits
    without = search_size(tmp_path, (), 16_384)
    assert 5 * logits + (2 << 30) < without.others < size.others
    assert without.memory == size.memory
