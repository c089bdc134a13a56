"""Checkpoints of 8-bit weights whose activations are rounded by row: what they stand for, and what
compressed-tensors computes of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.transform import TransformConfig, apply_transform_config

from tests.quant.test_calibrate import calibration_ids, read_tensors, wide_checkpoint
from tests.quant.test_gptq_calibration import written
from tests.support.evaluate import stepper
from tests.support.models import tiny_checkpoint
from tests.support.quantized import dequantized, taken_apart
from trtc.builder.targets.registry import parse_target
from trtc.protos.errors import UnsupportedError
from trtc.quant.calibrate import quantize_checkpoint
from trtc.quant.formats.transforms import TRANSFORMS
from trtc.quant.scheme import (
    SCHEMES,
    CheckpointQuantization,
    QuantizedLinear,
    without_dynamic_activations,
)

NOISE = {"fp8_dynamic": 1.5e-3, "int8_dynamic": 2e-4, "int8_hadamard": 2e-4}
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


@pytest.mark.parametrize(
    ("scheme", "most"), [("fp8_dynamic", 1e-4), ("int8_dynamic", 4e-3), ("int8_hadamard", 4e-3)]
)
def test_compressed_tensors_computes_the_same_logits(
    scheme: str, most: float, tmp_path: Path
) -> None:
    """Transformers' model by the library, which rounds activations too; to int8 by a 127.5th of the
    largest, and not by a 127th as vLLM does. Transformers leaves the transforms out that
    config.json declares, and the library knows how to rotate inputs."""
    source = wide_checkpoint("llama", tmp_path)
    ids = calibration_ids(tmp_path / "ids.jsonl")
    _, found, _ = written(source, scheme, tmp_path / "out", ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    )
    rotate_inputs(theirs, tmp_path / "out")
    tokens = np.arange(3, 35)
    with torch.inference_mode():
        expected = theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
    logits = stepper(tmp_path / "out", "fp32", quantization=found).prefill(tokens.tolist(), 20)
    error = np.square(logits - expected).sum() / np.square(expected).sum()
    assert error < most, f"{error:.1e}"


def rotate_inputs(model: torch.nn.Module, checkpoint: Path) -> None:
    """As a checkpoint declares it: what its weights went through is in them."""
    declared = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    if TRANSFORMS in declared:
        config = TransformConfig.model_validate(declared[TRANSFORMS])
        for group in config.config_groups.values():
            group.apply = [step for step in group.apply if step.is_online()]
            assert group.apply
        apply_transform_config(model, config)


def test_weights_are_rotated_as_compressed_tensors_does(tmp_path: Path) -> None:
    """By the declared transforms, before they are rounded: half a unit of its scale is all that a
    weight may be off."""
    source = wide_checkpoint("llama", tmp_path)
    ids = calibration_ids(tmp_path / "ids.jsonl")
    _, found, tensors = written(source, "int8_hadamard", tmp_path / "out", ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    apply_transform_config(model, TransformConfig.model_validate(declared[TRANSFORMS]))
    head = read_tensors(source)["lm_head.weight"].astype(np.float64)
    np.testing.assert_array_equal(model.lm_head.weight.detach().numpy(), head)
    for prefix in found.linears:
        rotated = model.get_submodule(prefix).weight.detach().numpy()
        scale = tensors[f"{prefix}.weight_scale"].astype(np.float64)
        units = rotated / scale - tensors[f"{prefix}.weight"]
        assert np.abs(units).max() < 0.502, prefix


def test_a_model_without_whole_blocks_is_refused_by_name(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path, hidden_size=128, intermediate_size=160)
    with pytest.raises(UnsupportedError, match=r"down_proj: has 160 input .* --keep"):
        quantize_checkpoint(
            source, SCHEMES["int8_hadamard"], "bf16", None, tmp_path / "out", lambda step: None
        )


@pytest.mark.parametrize("target", ["tensorrt:sm_90", "tensorrt-rtx:sm_89"])
@pytest.mark.parametrize("scheme", ["fp8_dynamic", "int8_hadamard"])
def test_tensorrt_refuses_it_by_name(target: str, scheme: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{scheme} has dynamic ones"):
        parse_target(target).check_scheme(SCHEMES[scheme])


def test_tensorrt_refuses_checkpoints_of_it_by_name() -> None:
    scheme = SCHEMES["int8_hadamard"]
    linear = QuantizedLinear("i8", {}, dynamic=True, hadamard=scheme.hadamard)
    found = CheckpointQuantization("compressed-tensors", scheme, {"q_proj": linear}, {})
    with pytest.raises(UnsupportedError, match="q_proj: is rotated by a Hadamard matrix"):
        without_dynamic_activations(found)
