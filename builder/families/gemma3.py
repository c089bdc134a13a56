"""Gemma 3: windows on five layers of six, rope by layer type, q and k norms, scaled embeddings."""

import dataclasses
import math

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_by_layer_type
from trtc.builder.spec import DecoderSpec, LayerSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
"""What the text part of a published config.json leaves out."""
_PATTERN = 6
_THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}
_OTHER_PARTS = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")
"""Tensors of the parts of Gemma3ForConditionalGeneration that see images."""

_NORMS = common.NormStyle(unit_offset=True)


def gemma3(config: Config, max_seq_len: int) -> DecoderSpec:
    """Gemma3ForCausalLM, and the text model in Gemma3ForConditionalGeneration."""
    config = config.with_defaults(**_DEFAULTS)
    config.require("use_bidirectional_attention", (False,), False)
    dim = common.head_dim(config)
    ropes = {
        kind: rope_by_layer_type(config, kind, dim, max_seq_len, default_theta=theta)
        for kind, theta in _THETAS.items()
    }
    act = common.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    bias = config.flag("attention_bias", False)
    intermediate = config.integer("intermediate_size")
    pattern = config.integer("sliding_window_pattern", _PATTERN)
    scale = config.number("query_pre_attn_scalar") ** -0.5
    softcap = config.optional_number("attn_logit_softcapping")

    def layer(index: int, prefix: str) -> LayerSpec:
        def norm(name: str) -> NormSpec:
            return common.norm(config, f"{prefix}.{name}", _NORMS)

        window = common.window_by_layer_type(
            config, index, "sliding_attention" if (index + 1) % pattern else "full_attention"
        )
        attention = common.attention(
            config,
            prefix,
            ropes["full_attention" if window is None else "sliding_attention"],
            dim=dim,
            qkv_bias=bias,
            o_bias=bias,
            window=window,
        )
        return LayerSpec(
            mixer=dataclasses.replace(
                attention,
                scale=scale,
                softcap=softcap,
                q_norm=norm("self_attn.q_norm"),
                k_norm=norm("self_attn.k_norm"),
            ),
            mlp=common.gated_mlp(config, f"{prefix}.mlp", intermediate, act),
            attention_norm=norm("input_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"),
            attention_post_norm=norm("post_attention_layernorm"),
            mlp_post_norm=norm("post_feedforward_layernorm"),
        )

    spec = common.decoder(
        config,
        "gemma3",
        layer,
        tied_by_default=True,
        style=_NORMS,
        embedding_scale=math.sqrt(config.integer("hidden_size")),
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )
    return dataclasses.replace(spec, ignored_tensors=(*spec.ignored_tensors, *_OTHER_PARTS))
