"""Module: an ONNX graph with recipes of its weights, which passes rewrite and targets lower."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from trtc.builder.recipes import Recipe
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import Limits

TRTC_DOMAIN = "trtc"
TENSORRT_DOMAIN = "trt"
"""Operators that TensorRT's parser knows beside ONNX's."""
OPSET = 23


@dataclass(frozen=True)
class Module:
    """A graph and the recipes of its initialisers.

    Every initialiser of `model` is external (data_location EXTERNAL, location = its own name, no
    bytes) and has a recipe under the same name, except scalars and vectors that passes compare:
    those of at most 16 elements are inline as well, so that a pass can see that two scales are
    equal without a checkpoint. So are all shapes and sizes.

    Graph inputs: those of protos/step.py, then for each entry of `kv` its layer's kv_i
    [pages, planes, page_size, kv_heads, head_dim], or of a state [pages, columns, width]. Outputs:
    logits [R, vocab] float32, then kv_i_out ... (the same memory as kv_i).
    """

    model: onnx.ModelProto
    recipes: Mapping[str, Recipe]
    kv: CacheLayout
    limits: Limits
