"""How much memory a calibration is expected to take."""

import json
from pathlib import Path

import pytest

from tests.support.weight_bytes import WeightBytes
from trtc.quant.calibrate import _planned
from trtc.quant.device import Gpu, choose_device
from trtc.quant.scheme import SCHEMES

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
TABLES = 2 * 128256 * 8192 * 2
LAYER = (2 * 8192 + 2 * 1024 + 3 * 28672) * 8192 * 2
WEIGHTS = WeightBytes(TABLES, LAYER)
"""Its embeddings and lm_head are more than a layer, and not there while layers are."""


@pytest.mark.parametrize("scheme", ["fp8", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4", "int4"])
@pytest.mark.parametrize("layers", [2, 80])
def test_70b_is_calibrated_on_a_gpu_of_24_gb(scheme: str, layers: int, tmp_path: Path) -> None:
    config = {**LLAMA_70B, "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    work = _planned(tmp_path, SCHEMES[scheme], "f8e4m3", ()).calibrator.work_bytes(tmp_path)
    assert choose_device(WEIGHTS, (Gpu("cuda:0", "", 24 * 10**9),), work).device == "cuda:0"
    assert choose_device(WEIGHTS, (Gpu("cuda:0", "", 8 * 10**9),), work).device == "cpu"
