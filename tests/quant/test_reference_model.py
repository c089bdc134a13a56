"""The model that calibration runs and accuracy is judged by."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.models import random_prompt, tiny_checkpoint, transformers_logits
from trtc.protos.errors import CheckpointError, UnsupportedError
from trtc.quant.reference_logits import reference_logits
from trtc.quant.reference_model import empty_model, load_config, reference_dtype


def set_type(path: Path, model_type: str) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))


@pytest.mark.parametrize(("family", "model_type"), [("deepseek_v3", "kimi_k2"), ("mistral4", None)])
def test_models_that_automodel_does_not_know(
    family: str, model_type: str | None, tmp_path: Path
) -> None:
    """Kimi-K2 is DeepSeek-V3 by another name, Mistral 4 missing from the list."""
    path = tiny_checkpoint(family, tmp_path)
    prompt = random_prompt(20)
    expected = transformers_logits(path, prompt)
    if model_type is not None:
        set_type(path, model_type)
    assert reference_dtype(path) == "float32"
    (found,) = reference_logits(path, [np.array(prompt, np.int32)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "error"), [("deepseek_v99", CheckpointError), ("clip", UnsupportedError)]
)
def test_what_generates_no_text_is_refused(
    model_type: str, error: type[Exception], tmp_path: Path
) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    set_type(path, model_type)
    with pytest.raises(error, match=model_type):
        reference_dtype(path)


def test_a_model_without_weights_has_its_layers(tmp_path: Path) -> None:
    """Llama 4's base has another name within a model of several parts."""
    model = empty_model(load_config(tiny_checkpoint("llama4", tmp_path)))
    assert len(model.base_model.layers) == model.config.num_hidden_layers
