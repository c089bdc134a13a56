"""Calibration by nvidia-modelopt of one layer after the other, against modelopt's own functions on
the whole model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.quant.test_calibrate import HELDOUT, read_tensors, wide_checkpoint
from tests.support.models import VOCAB_SIZE
from trtc.protos.manifest import LayerError
from trtc.quant.awq import with_fast_search
from trtc.quant.calibration import CalibrationJob
from trtc.quant.calibration_text import TokenSet
from trtc.quant.experts import own_factors, prepare_export, separate_experts
from trtc.quant.layer_source import LayeredModel
from trtc.quant.layerwise import BATCH
from trtc.quant.modelopt_ptq import ModeloptCalibrator, modelopt_config
from trtc.quant.quiet import quiet_libraries
from trtc.quant.reference_model import load_model
from trtc.quant.scheme import SCHEMES, Modelopt, Scheme
from trtc.quant.wide_linears import wide_linears

CASES = [
    ("llama", "fp8"),
    ("llama_biased", "int8_sq"),
    ("llama", "int4_awq"),
    ("llama", "w4a8_awq"),
    ("llama", "nvfp4"),
    ("gemma4_e", "fp8"),  # keys and values of other layers
    ("glm_moe_dsa", "fp8"),  # selections of other layers
    ("cohere", "int8_sq"),  # a norm before attention and MLP
    ("mixtral", "fp8"),  # renamed
    ("starcoder2", "nvfp4"),  # modelopt quantises what norms with a bias get, the last one's too
]
IDS = np.random.default_rng(7).integers(3, VOCAB_SIZE, (6, 32), np.int32)


TOKENS = TokenSet("ids", "", tuple(IDS))


def layer_by_layer(
    source: Path, scheme: Scheme, output: Path, heldout: TokenSet = HELDOUT
) -> tuple[LayerError, ...]:
    output.mkdir()
    model = LayeredModel(source, "bfloat16")
    separate_experts(model.model)
    job = CalibrationJob(model, source, output, TOKENS, heldout, "", lambda step: None)
    return ModeloptCalibrator(scheme, "f8e4m3", ()).run(job)


def by_modelopt_alone(name: str) -> Scheme:
    """Weights rounded to nearest."""
    scheme = SCHEMES[name]
    assert isinstance(scheme.calibration, Modelopt)
    return replace(scheme, calibration=replace(scheme.calibration, rounding=None))


def whole(source: Path, scheme: str, output: Path) -> None:
    model = load_model(source, "bfloat16")
    separate_experts(model)
    prepare_export()

    def running(batch: int) -> Callable[[Any], None]:
        def run(model: Any) -> None:
            with torch.inference_mode(), wide_linears():
                for rows in torch.from_numpy(IDS.astype(np.int64)).split(batch):
                    model.base_model(rows, use_cache=False)

        return run

    run = running(BATCH)
    if "awq" in scheme:
        run = with_fast_search(run, running(len(IDS)))
    with quiet_libraries(), own_factors():
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        mtq.quantize(model, modelopt_config(SCHEMES[scheme], "f8e4m3"), run)
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=output)


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_checkpoints_are_those_of_the_whole_model(family: str, scheme: str, tmp_path: Path) -> None:
    source = wide_checkpoint(family, tmp_path)
    stored = (source / "model.safetensors").read_bytes()
    layer_by_layer(source, by_modelopt_alone(scheme), tmp_path / "layers")
    whole(source, scheme, tmp_path / "whole")
    found, expected = (read_tensors(tmp_path / name) for name in ("layers", "whole"))
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    for name in ("config.json", "hf_quant_config.json"):
        texts = ((tmp_path / one / name).read_text() for one in ("layers", "whole"))
        assert json.loads(next(texts)) == json.loads(next(texts))
    # Weights are mapped, and some algorithms write into them.
    assert (source / "model.safetensors").read_bytes() == stored


def test_nothing_is_dropped_out_while_layers_are_measured(tmp_path: Path) -> None:
    source = wide_checkpoint("seed_oss", tmp_path)
    assert json.loads((source / "config.json").read_text())["attention_dropout"] > 0
    scheme = SCHEMES["fp8"]
    first, second = (layer_by_layer(source, scheme, tmp_path / name) for name in ("a", "b"))
    assert first == second


@pytest.mark.parametrize("family", ["llama_biased", "mixtral", "starcoder2"])
def test_weights_that_gptq_rounds_give_nearer_outputs(family: str, tmp_path: Path) -> None:
    """With the scales of modelopt, and all else as it writes it."""
    source = wide_checkpoint(family, tmp_path)
    schemes = {"rounded": SCHEMES["fp8"], "nearest": by_modelopt_alone("fp8")}
    errors = {
        name: layer_by_layer(source, scheme, tmp_path / name, heldout=TOKENS)
        for name, scheme in schemes.items()
    }
    found, expected = (read_tensors(tmp_path / name) for name in schemes)
    assert sorted(found) == sorted(expected)
    weights = [name for name, tensor in expected.items() if tensor.dtype.name == "float8_e4m3fn"]
    assert len(weights) == len({one.layer for one in errors["nearest"]})
    for name, tensor in expected.items():
        if name in weights:
            assert (found[name] != tensor).any(), name
        else:
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    gains = [a.sqnr_db - b.sqnr_db for a, b in zip(*errors.values(), strict=True)]
    assert np.mean(gains) > 1, gains
