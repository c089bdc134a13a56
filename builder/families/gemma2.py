"""Gemma 2: norms before and after, softcaps, windows on every other layer, scaled embeddings."""

import dataclasses
import math

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, LayerSpec, NormSpec

_NORMS = common.NormStyle(unit_offset=True)


def gemma2(config: Config, max_seq_len: int) -> DecoderSpec:
    """Gemma2ForCausalLM."""
    config.require("use_bidirectional_attention", (False,), False)
    dim = common.head_dim(config, 256)
    rope = rope_spec(config, dim, max_seq_len)
    act = common.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    bias = config.flag("attention_bias", False)
    intermediate = config.integer("intermediate_size")
    scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    softcap = _softcap(config, "attn_logit_softcapping", 50.0)

    def layer(index: int, prefix: str) -> LayerSpec:
        attention = common.attention(
            config,
            prefix,
            rope,
            dim=dim,
            qkv_bias=bias,
            o_bias=bias,
            window=common.window_by_layer_type(
                config, index, "full_attention" if index % 2 else "sliding_attention"
            ),
        )

        def norm(name: str) -> NormSpec:
            return common.norm(config, f"{prefix}.{name}", _NORMS)

        return LayerSpec(
            mixer=dataclasses.replace(attention, scale=scale, softcap=softcap),
            mlp=common.gated_mlp(config, f"{prefix}.mlp", intermediate, act),
            attention_norm=norm("input_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"),
            attention_post_norm=norm("post_attention_layernorm"),
            mlp_post_norm=norm("post_feedforward_layernorm"),
        )

    return common.decoder(
        config,
        "gemma2",
        layer,
        tied_by_default=True,
        style=_NORMS,
        embedding_scale=math.sqrt(config.integer("hidden_size")),
        logit_softcap=_softcap(config, "final_logit_softcapping", 30.0),
    )


def _softcap(config: Config, key: str, default: float) -> float | None:
    """Null turns a softcap off; only an absent key means the default."""
    return config.optional_number(key) if key in config.fields else default
