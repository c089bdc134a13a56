"""builder/weights.py: checkpoints whose rotary embedding turns neighbours, in every scheme."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.engines import config_dict
from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.families.registry import decoder_spec
from trtc.builder.recipes import Array
from trtc.builder.weights import Tensor, linear_weights
from trtc.quant.scheme import SCHEMES

HEAD_DIM, ROTARY_DIM, KV_HEADS = 64, 32, 2
ROTATED = np.arange(ROTARY_DIM).reshape(2, -1)
"""Dimensions of a head as trtc turns them: the i-th of either row together."""


def in_pairs(heads: Array) -> Array:
    """What trtc has, [heads, D, ...], in the checkpoint's order: those that turn together are
    neighbours, the rest is behind."""
    turned = np.stack([heads[:, half] for half in ROTATED], axis=2)
    flat = turned.reshape(heads.shape[0], ROTARY_DIM, *heads.shape[2:])
    return np.concatenate((flat, heads[:, ROTARY_DIM:]), axis=1)


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4"])
def test_rows_of_heads_are_reordered_with_their_scales(scheme: str) -> None:
    sizes = {"hidden_size": 256, "head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS}
    spec = decoder_spec(config_dict("glm4", **sizes), 64)
    reader, quantization = dummy_checkpoint(spec, SCHEMES[scheme])
    quantized = {} if quantization is None else quantization.linears
    k = spec.layers[0].attention.k
    assert k.interleaved is not None and k.has_bias
    stored = linear_weights(replace(k, interleaved=None), quantized, "bf16", reader)
    found = linear_weights(k, quantized, "bf16", reader)
    reordered = 0
    for name in ("weight", "bias", "scale", "scale_2", "input_scale", "pre_scale"):
        ours, theirs = getattr(found, name), getattr(stored, name)
        assert (ours is None) == (theirs is None)
        if not isinstance(ours, Tensor):
            continue
        values, expected = ours.recipe.load(reader), theirs.recipe.load(reader)
        if values.ndim and values.shape[0] == k.out_features:
            values = in_pairs(values.reshape(KV_HEADS, HEAD_DIM, *values.shape[1:]))
            reordered += not np.array_equal(ours.recipe.load(reader), expected)
        np.testing.assert_array_equal(values.reshape(expected.shape), expected)
    assert reordered >= 2, "weight and bias"
    assert spec.layers[0].attention.v.interleaved is None
