"""OLMo Hybrid: gated delta nets with norms before, and attention with OLMo's norms after."""

from dataclasses import replace

from trtc.builder.families import common, delta
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_parameters, rope_spec
from trtc.builder.spec import (
    NO_ROPE,
    DecoderSpec,
    GatedDeltaSpec,
    LayerSpec,
    LinearSpec,
    NormSpec,
    RopeSpec,
)

_INTERVAL = 4
_THETA = 10000.0
_KEY_SHARE = 0.75
"""Of the hidden size are all keys, where `linear_key_head_dim` is not given."""
_HEAD_NORM_EPS = 1e-5
"""Whatever `rms_norm_eps` is."""
_DELTA_NORMS = common.NormNames(attention="attention_layer_norm", mlp="feedforward_layer_norm")
_OTHER_NAMES = (
    ("attention_layer_norm", "input_layernorm"),
    ("feedforward_layer_norm", "post_attention_layernorm"),
    ("post_attention_layernorm", "feedforward_layer_norm"),
)
"""Transformers calls norms otherwise than the published checkpoints, and saves those after
attention by the name that these have for norms before an MLP."""


def olmo_hybrid(config: Config, max_seq_len: int) -> DecoderSpec:
    """OlmoHybridForCausalLM."""
    config = _with_defaults(config)
    config.require("hidden_act", tuple(common.SILU), "silu")
    kinds, dim = _layer_kinds(config), common.head_dim(config)
    rope = _rope(config, dim, max_seq_len)
    bias = config.flag("attention_bias", False)

    def layer(index: int, prefix: str) -> LayerSpec:
        mlp = common.gated_mlp(config, f"{prefix}.mlp", config.integer("intermediate_size"), "silu")
        if kinds[index] == common.LINEAR:
            net = _delta(config, f"{prefix}.linear_attn")
            return common.layer_spec(config, prefix, net, mlp, _DELTA_NORMS)
        attention = common.attention(
            config, prefix, rope, dim=dim, qkv_bias=bias, o_bias=bias, qk_norm="row"
        )
        return common.layer_spec(config, prefix, attention, mlp, common.POST_NORMS)

    return replace(common.decoder(config, "olmo_hybrid", layer), other_names=_OTHER_NAMES)


def _with_defaults(config: Config) -> Config:
    heads = config.integer("num_attention_heads")
    config = config.with_defaults(
        linear_num_key_heads=heads, linear_num_value_heads=heads, linear_conv_kernel_dim=4
    )
    keys = int(_KEY_SHARE * config.integer("hidden_size"))
    config = config.with_defaults(
        linear_key_head_dim=keys // config.integer("linear_num_key_heads")
    )
    return config.with_defaults(linear_value_head_dim=2 * config.integer("linear_key_head_dim"))


def _layer_kinds(config: Config) -> tuple[str, ...]:
    """Of each layer: `layer_types`, or attention on every fourth and, of fewer, on the last."""
    kinds = common.types_of_layers(config, "layer_types", (common.LINEAR, common.FULL))
    if kinds is not None:
        return kinds
    layers = config.integer("num_hidden_layers")
    interval = min(_INTERVAL, layers)
    return tuple(
        common.LINEAR if (index + 1) % interval else common.FULL for index in range(layers)
    )


def _rope(config: Config, dim: int, max_seq_len: int) -> RopeSpec:
    """Most published checkpoints have none, which a `rope_theta` of null says."""
    parameters = rope_parameters(config)
    theta = parameters.get("rope_theta", config.fields.get("rope_theta", _THETA))
    return NO_ROPE if theta is None else rope_spec(config, dim, max_seq_len, default_theta=_THETA)


def _delta(config: Config, prefix: str) -> GatedDeltaSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("linear_num_value_heads")
    keys, values = delta.widths(config)

    def linear(own: str, width: int) -> LinearSpec:
        return LinearSpec(f"{prefix}.{own}_proj", hidden, width)

    return GatedDeltaSpec(
        qkv=(linear("q", keys), linear("k", keys), linear("v", values)),
        z=linear("g", values),
        b=linear("b", heads),
        a=linear("a", heads),
        out_proj=LinearSpec(f"{prefix}.o_proj", values, hidden),
        conv=(f"{prefix}.q_conv1d", f"{prefix}.k_conv1d", f"{prefix}.v_conv1d"),
        taps=config.integer("linear_conv_kernel_dim", least=2),
        a_log=f"{prefix}.A_log",
        dt_bias=f"{prefix}.dt_bias",
        norm=NormSpec(f"{prefix}.o_norm.weight", _HEAD_NORM_EPS),
        num_key_heads=config.integer("linear_num_key_heads"),
        num_value_heads=heads,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        write_scale=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
    )
