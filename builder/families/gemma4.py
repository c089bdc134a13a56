"""Gemma 4: two sizes of heads by layer type, values that are normalised and may be the keys, layers
scaled by a number each."""

import dataclasses
import math

from trtc.builder.families import common
from trtc.builder.families.config import Config, shown
from trtc.builder.families.rope import rope_by_layer_type
from trtc.builder.spec import DecoderSpec, LayerSpec, NormSpec, RopeSpec
from trtc.protos.errors import CheckpointError, UnsupportedError

_DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        common.SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        common.FULL: {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
    },
}
"""What the text part of a published config.json leaves out."""
_UNIFIED_DEFAULTS = {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_GLOBAL_HEAD_DIM = 512
_PATTERN = 6
_OVERRIDES = frozenset({"head_dim", "num_key_value_heads"})
"""Fields that layers may have values of their own of."""
_OTHER_PARTS = (
    r"(model\.)?(vision_tower|vision_embedder|audio_tower|audio_embedder)\..*",
    r"(model\.)?(embed_vision|embed_audio|multi_modal_projector)\..*",
)
"""Tensors of the parts that see and hear."""


def gemma4(config: Config, max_seq_len: int) -> DecoderSpec:
    """Gemma4ForCausalLM, and the text model in Gemma4ForConditionalGeneration.

    Raises:
        UnsupportedError: layers that share keys and values, experts, or inputs of each layer.
    """
    config = config.with_defaults(**_DEFAULTS)
    # "vision": what text alone does not use.
    config.require("use_bidirectional_attention", ("vision",), "vision")
    config.require("num_kv_shared_layers", (0,), 0)
    config.require("enable_moe_block", (False,), False)
    config.require("hidden_size_per_layer_input", (0,), 0)
    layers = tuple(_layer_config(config, n) for n in range(config.integer("num_hidden_layers")))
    ropes = _ropes(config, layers, max_seq_len)
    act = common.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    bias = config.flag("attention_bias", False)
    keys_are_values = config.flag("attention_k_eq_v", False)
    intermediate = config.integer("intermediate_size")

    def layer(index: int, prefix: str) -> LayerSpec:
        def norm(name: str) -> NormSpec:
            return common.norm(config, f"{prefix}.{name}")

        kind = _layer_type(config, index)
        attention = common.attention(
            layers[index],
            prefix,
            ropes[kind],
            dim=layers[index].integer("head_dim"),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            window=config.integer("sliding_window") if kind == common.SLIDING else None,
        )
        return LayerSpec(
            mixer=dataclasses.replace(
                attention,
                scale=1.0,
                v=None if keys_are_values and kind == common.FULL else attention.v,
                v_norm=dataclasses.replace(norm("self_attn.v_norm"), weight=None),
            ),
            mlp=common.gated_mlp(config, f"{prefix}.mlp", intermediate, act),
            attention_norm=norm("input_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"),
            attention_post_norm=norm("post_attention_layernorm"),
            mlp_post_norm=norm("post_feedforward_layernorm"),
            scalar=f"{prefix}.layer_scalar",
        )

    spec = common.decoder(
        config,
        "gemma4",
        layer,
        tied_by_default=True,
        embedding_scale=math.sqrt(config.integer("hidden_size")),
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )
    return dataclasses.replace(spec, ignored_tensors=(*spec.ignored_tensors, *_OTHER_PARTS))


def gemma4_unified(config: Config, max_seq_len: int) -> DecoderSpec:
    """The text model in Gemma4UnifiedForConditionalGeneration, which has other defaults."""
    return gemma4(config.with_defaults(**_UNIFIED_DEFAULTS), max_seq_len)


def _layer_type(config: Config, index: int) -> str:
    """Five sliding layers to a full one, unless `layer_types` says otherwise; the last layer is
    always full, as in Transformers."""
    is_last = index == config.integer("num_hidden_layers") - 1
    kind = common.layer_type(
        config, index, common.SLIDING if (index + 1) % _PATTERN else common.FULL
    )
    return common.FULL if is_last else kind


def _layer_config(config: Config, index: int) -> Config:
    """The config with what is a layer's own: `per_layer_config`, as newer Transformers save it, or
    in full layers `global_head_dim` and `num_global_key_value_heads`.

    Raises:
        UnsupportedError: a layer has a field of its own that trtc does not read by layer.
        CheckpointError: a field is no number, or `per_layer_config` no object of objects.
    """
    field = "per_layer_config"
    given = config.get(field)
    if given is not None:
        own = given.get(str(index), {}) if isinstance(given, dict) else given
        if not isinstance(own, dict):
            raise CheckpointError(
                f"is {shown(given)}, not an object of each layer", field=f"config.json: {field}"
            )
        if unknown := sorted(set(map(str, own)) - _OVERRIDES):
            raise UnsupportedError(
                f"{shown(unknown[0])} of layer {index} is not supported",
                field=f"config.json: {field}",
                remedy=f"trtc builds this family only with {' and '.join(sorted(_OVERRIDES))}",
            )
        return Config({**config.fields, **own})
    if _layer_type(config, index) == common.SLIDING:
        return config
    heads = config.integer("num_key_value_heads")
    if config.flag("attention_k_eq_v", False):
        heads = config.integer("num_global_key_value_heads", heads)
    dim = config.integer("global_head_dim", _GLOBAL_HEAD_DIM)
    return Config({**config.fields, "head_dim": dim, "num_key_value_heads": heads})


def _ropes(config: Config, layers: tuple[Config, ...], max_seq_len: int) -> dict[str, RopeSpec]:
    """By layer type, for heads of the size that the layers of the type have.

    Raises:
        UnsupportedError: layers of one type differ in the size of their heads.
    """
    sizes: dict[str, int] = {}
    for index, layer in enumerate(layers):
        size = layer.integer("head_dim")
        if sizes.setdefault(_layer_type(config, index), size) != size:
            raise UnsupportedError(
                f"head_dim {size} of layer {index} is not that of other layers of its type",
                field="config.json: per_layer_config",
            )
    return {
        kind: rope_by_layer_type(config, kind, size, max_seq_len, default_theta=1e4)
        for kind, size in sizes.items()
    }
