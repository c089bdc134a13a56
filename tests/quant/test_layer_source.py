"""Models whose decoder layers are read when their turn comes: the same as those that are in memory
whole, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.models import random_prompt, tiny_checkpoint
from trtc.protos.errors import CheckpointError
from trtc.quant.experts import separate_experts
from trtc.quant.layer_source import LayeredModel
from trtc.quant.reference_logits import reference_logits
from trtc.quant.reference_model import load_model, reference_dtype

FAMILIES = (
    "llama",  # tied
    "gemma4_e",  # inputs of its own for each layer, and keys and values of other layers
    "gemma4_moe",
    "phi3_longrope",
    "qwen3_moe",  # experts that are merged
    "granite_moe",  # renamed
    "llama4",  # transposed
    "jamba",
    "kimi_linear",  # convolutions that are joined
    "olmo_hybrid",  # of unequal parts
    "nemotron_h_moe",
    "gpt_oss",
    "deepseek_v3",
    "glm_moe_dsa",  # selections of other layers
)


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_logits_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(family, tmp_path, "bfloat16")
    prompts = [np.array(random_prompt(length, seed=length), np.int32) for length in (40, 40, 7)]
    whole = load_model(path, reference_dtype(path))
    for ids, found in zip(prompts, reference_logits(path, prompts), strict=True):
        with torch.inference_mode():
            expected = whole(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[
                0
            ]
        np.testing.assert_array_equal(found, expected.float().numpy())


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "gpt_oss"])
def test_a_layer_has_its_weights_while_it_is_held(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(family, tmp_path, "bfloat16")
    whole, source = load_model(path, "bfloat16"), LayeredModel(path, "bfloat16")
    for model in (whole, source.model):
        separate_experts(model)
    expected = dict(whole.base_model.layers.state_dict(keep_vars=True))
    assert all(tensor.is_meta for tensor in source.model.base_model.layers.state_dict().values())
    found = dict(source.model.named_buffers())
    for name, buffer in whole.named_buffers():
        if name not in whole.state_dict():  # computed
            torch.testing.assert_close(found[name], buffer, rtol=0, atol=0)
    for index in range(len(whole.base_model.layers)):
        with source.held(index) as layer:
            held = {f"{index}.{name}": one for name, one in layer.state_dict().items()}
        for name, tensor in held.items():
            reference = expected.pop(name)
            assert tensor.dtype == reference.dtype and torch.equal(tensor, reference), name
        assert all(tensor.is_meta for tensor in layer.state_dict().values())
    assert not expected


def test_a_layer_without_all_its_tensors_is_refused_before_the_work(tmp_path: Path) -> None:
    path = tiny_checkpoint("qwen3_moe", tmp_path, num_hidden_layers=1)
    config = path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1"):
        LayeredModel(path, "bfloat16")
    config.write_text(text.replace('"hidden_size": 64', '"hidden_size": 32'))
    with pytest.raises(CheckpointError, match="mismatched"):
        LayeredModel(path, "bfloat16")
