"""What a build takes from a checkpoint before it writes a graph."""

import json
from pathlib import Path

import pytest

from tests.support.models import tiny_checkpoint
from trtc.builder.request import BuildRequest
from trtc.builder.source import open_source
from trtc.protos.errors import UnsupportedError

FP8_KV = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(("asked", "expected"), [(None, "f8e4m3"), ("bf16", "bf16")])
def test_a_kv_type_declared_without_scales_is_honoured_unless_another_is_asked_for(
    tmp_path: Path, asked: str | None, expected: str
) -> None:
    model = tiny_checkpoint("llama", tmp_path, "bfloat16")
    (model / "hf_quant_config.json").write_text(json.dumps(FP8_KV))
    source = open_source(BuildRequest(str(model), tmp_path / "engine", kv_dtype=asked))
    assert source.kv_dtype == expected


@pytest.mark.parametrize("dtype", ["fp8_weights", "int8_weights"])
def test_schemes_that_are_only_read_are_not_made(tmp_path: Path, dtype: str) -> None:
    model = tiny_checkpoint("llama", tmp_path, "bfloat16")
    with pytest.raises(UnsupportedError, match=f"reads {dtype} checkpoints and does not make them"):
        open_source(BuildRequest(str(model), tmp_path / "engine", dtype=dtype))
