"""Routed experts as separate linears: the same model, under the names that checkpoints have."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.models import FAMILIES, architecture_of, random_prompt, tiny_config
from trtc.builder.families.registry import decoder_spec
from trtc.builder.spec import MoeMlpSpec
from trtc.protos.errors import UnsupportedError
from trtc.quant.experts import separate_experts
from trtc.quant.linears import linear_shapes, quantizable_linears


def config_dict(family: str) -> dict[str, object]:
    return {**tiny_config(family).to_dict(), "architectures": [architecture_of(family)]}


MIXTURES = tuple(
    family
    for family in FAMILIES
    if any(isinstance(one.mlp, MoeMlpSpec) for one in decoder_spec(config_dict(family), 64).layers)
    and family != "gpt_oss"
)


def plain(name: str) -> str:
    return re.sub(r"^.*?(?=layers\.)", "", name).replace(".block_sparse_moe.", ".mlp.")


@pytest.mark.parametrize("family", MIXTURES)
def test_separate_experts_compute_the_same_under_the_checkpoints_names(family: str) -> None:
    torch.manual_seed(1)
    model = getattr(transformers, architecture_of(family))._from_config(tiny_config(family)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    ids = torch.tensor([random_prompt(12)])
    with torch.inference_mode():
        expected = model(ids).logits
        experts = separate_experts(model)
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    spec = decoder_spec(config_dict(family), 64)
    assert len(experts) == sum(isinstance(layer.mlp, MoeMlpSpec) for layer in spec.layers)
    found = {plain(name) for name, _ in quantizable_linears(model)}
    assert found == {plain(linear.name) for linear in spec.linears}


def test_experts_that_compute_otherwise_are_refused(tmp_path: Path) -> None:
    """gpt-oss: clamped, with biases, and transposed."""
    tiny_config("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"mlp\.experts: are GptOssExperts"):
        linear_shapes(tmp_path)
