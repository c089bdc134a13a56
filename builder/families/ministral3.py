"""Ministral 3: Mistral with YaRN, and queries scaled by their position."""

import dataclasses

from trtc.builder.families.config import Config
from trtc.builder.families.dense import Dense, dense
from trtc.builder.families.rope import query_scale
from trtc.builder.spec import DecoderSpec, LayerSpec

OTHER_PARTS = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")
"""Tensors of the parts of Mistral3ForConditionalGeneration that see images."""


def ministral3(config: Config, max_seq_len: int) -> DecoderSpec:
    """Ministral3ForCausalLM, and the text model in Mistral3ForConditionalGeneration, which may be
    an older Mistral without scaled queries."""
    scale = query_scale(config)
    window = config.optional_integer("sliding_window")
    spec = dense(
        config.with_defaults(rms_norm_eps=1e-5),
        max_seq_len,
        Dense("ministral3"),
        window=lambda index: window,
    )

    def scaled(layer: LayerSpec) -> LayerSpec:
        return dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.attention, query_scale=scale)
        )

    return dataclasses.replace(
        spec,
        layers=tuple(scaled(layer) for layer in spec.layers),
        ignored_tensors=(*spec.ignored_tensors, *OTHER_PARTS),
    )
