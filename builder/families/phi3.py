"""Phi-3: q, k, v in one tensor, gate and up in another; partial and long rope."""

import dataclasses

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import AttentionSpec, DecoderSpec, LayerSpec, LinearSpec

_OLDER_ROPE_NAMES = {"su": "longrope", "yarn": "longrope"}


def phi3(config: Config, max_seq_len: int) -> DecoderSpec:
    """Phi3ForCausalLM."""
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len, renamed=_OLDER_ROPE_NAMES)
    window = config.optional_integer("sliding_window")

    def layer(_index: int, prefix: str) -> LayerSpec:
        attention = common.attention(config, prefix, rope, dim=dim, window=window)
        return common.layer_spec(
            config, prefix, _with_fused_qkv(attention, prefix), common.fused_mlp(config, prefix)
        )

    return common.decoder(config, "phi3", layer)


def _with_fused_qkv(attention: AttentionSpec, layer: str) -> AttentionSpec:
    assert attention.k is not None and attention.v is not None
    q_rows = attention.q.out_features
    kv_rows = attention.k.out_features

    def rows(linear: LinearSpec, begin: int) -> LinearSpec:
        return dataclasses.replace(
            linear,
            name=f"{layer}.self_attn.qkv_proj",
            rows=(begin, begin + linear.out_features),
        )

    return dataclasses.replace(
        attention,
        q=rows(attention.q, 0),
        k=rows(attention.k, q_rows),
        v=rows(attention.v, q_rows + kv_rows),
    )
