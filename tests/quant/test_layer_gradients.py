"""Gradients a decoder layer at a time, against one graph through the whole model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.support.models import VOCAB_SIZE, random_prompt, tiny_checkpoint
from trtc.quant.experts import separate_experts
from trtc.quant.journal import Journal
from trtc.quant.layer_gradients import LayerGradients
from trtc.quant.layer_source import LayeredModel
from trtc.quant.linears import quantizable_linears
from trtc.quant.reference_model import load_model

SEED = 3
FAMILIES = (
    "llama",  # tied
    "gemma2",  # scaled embeddings, softcapped logits
    "qwen3_moe",
    "gemma4_e",  # inputs of its own for each layer, and keys and values of other layers
    "glm_moe_dsa",  # selections of other layers
    "jamba",
    "kimi_linear",
)
PROMPTS = [np.array(random_prompt(length, seed=length), np.int32) for length in (24, 24, 7)]
Gradients = dict[str, list[torch.Tensor]]


def watched(model: Any, found: Gradients) -> None:
    """Add gradients by outputs of linears, and of the lm_head, as they come."""

    def keep(name: str) -> Callable[..., None]:
        def forward(module: Any, inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(found.setdefault(name, []).append)  # type: ignore[no-untyped-call]

        return forward

    for name, module in (*quantizable_linears(model), ("lm_head", model.get_output_embeddings())):
        module.register_forward_hook(keep(name))


def opened(model: Any) -> Any:
    separate_experts(model)
    model.requires_grad_(False)
    return model


def of_whole(model: Any) -> Gradients:
    """One graph through all layers, from a leaf in the place of the embeddings."""
    found: Gradients = {}
    watched(model, found)
    leaves: list[torch.Tensor] = []

    def begin(table: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    model.get_input_embeddings().register_forward_hook(begin)
    generator = torch.Generator().manual_seed(SEED)
    for ids in PROMPTS:
        row = torch.from_numpy(ids.astype(np.int64))[None]
        logits = model(row, use_cache=False).logits[0].float()
        labels = torch.multinomial(torch.softmax(logits.detach(), -1), 1, generator=generator)
        loss = functional.cross_entropy(logits, labels[:, 0], reduction="sum")
        torch.autograd.backward(loss)
    found["embeddings"] = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return found


def of_layers(source: LayeredModel, directory: Path) -> Gradients:
    found: Gradients = {}
    watched(source.model, found)
    gradients = LayerGradients(source, PROMPTS, Journal(directory), "", lambda step: None)
    gradients.from_logits(torch.Generator().manual_seed(SEED))
    for index in reversed(range(len(source.model.base_model.layers))):
        with source.held(index) as layer:
            gradients.through(layer, index)
    found["embeddings"] = list(gradients.by_embeddings())
    return found


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), *((family, "bfloat16") for family in FAMILIES)]
)
def test_gradients_are_those_of_one_graph(family: str, dtype: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(family, tmp_path, "bfloat16")
    expected = of_whole(opened(load_model(path, dtype)))
    source = LayeredModel(path, dtype)
    opened(source.model)
    found = of_layers(source, tmp_path / "kept")
    assert found.keys() == expected.keys()
    for name, gradients in found.items():
        torch.testing.assert_close(gradients, expected[name], rtol=0, atol=0, msg=name)


def test_logits_in_parts_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are those of whole sequences, too: others would give other gradients."""
    path = tiny_checkpoint("gemma2", tmp_path, "bfloat16")

    def found(kept: str) -> Gradients:
        source = LayeredModel(path, "float32")
        opened(source.model)
        return of_layers(source, tmp_path / kept)

    whole = found("whole")
    monkeypatch.setattr("trtc.quant.layerwise._LOGIT_BYTES", 7 * 4 * VOCAB_SIZE)
    parts = found("parts")
    assert [one.shape[1] for one in parts["lm_head"]] == [7, 7, 7, 3] * 2 + [7]
    for one in (whole, parts):
        one["lm_head"] = [torch.cat(one["lm_head"], 1)]
    assert parts.keys() == whole.keys()
    for name, gradients in parts.items():
        torch.testing.assert_close(gradients, whole[name], rtol=1e-4, atol=1e-6, msg=name)
