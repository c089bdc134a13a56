"""Ministral 3: Mistral with YaRN, and queries scaled by their position."""

import dataclasses

from trtc.builder.families.config import Config, shown
from trtc.builder.families.dense import Dense, dense
from trtc.builder.spec import DecoderSpec, LayerSpec, QueryScale
from trtc.protos.errors import CheckpointError

_OTHER_PARTS = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")
"""Tensors of the parts of Mistral3ForConditionalGeneration that see images."""


def ministral3(config: Config, max_seq_len: int) -> DecoderSpec:
    """Ministral3ForCausalLM, and the text model in Mistral3ForConditionalGeneration, which may be
    an older Mistral without scaled queries."""
    scale = _query_scale(config)
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
        ignored_tensors=(*spec.ignored_tensors, *_OTHER_PARTS),
    )


def _query_scale(config: Config) -> QueryScale | None:
    """None: the config has no `llama_4_scaling_beta`.

    Raises:
        CheckpointError: the rope parameters are none, or one of theirs is wrong.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(
            f"is {shown(given)}, not an object", field="config.json: rope_parameters"
        )
    parameters = Config(given)
    beta = parameters.optional_number("llama_4_scaling_beta")
    if beta is None:
        return None
    return QueryScale(beta, parameters.integer("original_max_position_embeddings"))
