"""Checkpoints of 8-bit weights whose activations are rounded by row: what they stand for, and what
compressed-tensors computes of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.quant.test_calibrate import calibration_ids, read_tensors, wide_checkpoint
from tests.quant.test_gptq_calibration import written
from tests.support.evaluate import stepper
from tests.support.quantized import dequantized, taken_apart
from trtc.builder.targets.registry import parse_target
from trtc.protos.errors import UnsupportedError
from trtc.quant.scheme import SCHEMES

NOISE = {"fp8_dynamic": 1.5e-3, "int8_dynamic": 2e-4}
"""Share of a weight's power, with room."""


@pytest.mark.parametrize("family", ["llama_biased", "granite_moe"])
@pytest.mark.parametrize("scheme", NOISE)
def test_weights_stand_for_the_originals(family: str, scheme: str, tmp_path: Path) -> None:
    source = wide_checkpoint(family, tmp_path)
    ids = calibration_ids(tmp_path / "ids.jsonl")
    facts, found, tensors = written(source, scheme, tmp_path / "out", ids)
    assert found.scheme.name == scheme and not found.notes
    assert all(linear.dynamic for linear in found.linears.values())
    assert {e.layer for e in facts.layers} >= {n for n in found.linears if "expert" not in n}
    assert all(20 < error.sqnr_db < 60 for error in facts.layers)
    for name, tensor in taken_apart(read_tensors(source)).items():
        prefix = name.removesuffix(".weight")
        if prefix not in found.linears:
            np.testing.assert_array_equal(tensors[name], tensor)
            continue
        exact = tensor.astype(np.float64)
        noise = np.square(dequantized(found, prefix, tensors) - exact).sum()
        assert noise < NOISE[scheme] * np.square(exact).sum(), name


@pytest.mark.parametrize(("scheme", "most"), [("fp8_dynamic", 1e-4), ("int8_dynamic", 4e-3)])
def test_compressed_tensors_computes_the_same_logits(
    scheme: str, most: float, tmp_path: Path
) -> None:
    """Transformers' model by the library, which rounds activations too; to int8 by a 127.5th of the
    largest, and not by a 127th as vLLM does."""
    source = wide_checkpoint("llama", tmp_path)
    ids = calibration_ids(tmp_path / "ids.jsonl")
    _, found, _ = written(source, scheme, tmp_path / "out", ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    )
    tokens = np.arange(3, 35)
    with torch.inference_mode():
        expected = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
    logits = stepper(tmp_path / "out", "fp32", quantization=found).prefill(tokens.tolist(), 20)
    error = np.square(logits - expected).sum() / np.square(expected).sum()
    assert error < most, f"{error:.1e}"


@pytest.mark.parametrize("target", ["tensorrt:sm_90", "tensorrt-rtx:sm_89"])
def test_tensorrt_refuses_it_by_name(target: str) -> None:
    with pytest.raises(UnsupportedError, match="fp8_dynamic has dynamic ones"):
        parse_target(target).check_scheme(SCHEMES["fp8_dynamic"])
