"""Qwen3: q and k are normalised head by head before rope."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.qwen2 import qwen_window
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, LayerSpec

_HEAD_DIM_WHEN_UNSAID = 128


def qwen3(config: Config, max_seq_len: int) -> DecoderSpec:
    """Qwen3ForCausalLM."""
    dim = common.head_dim(config, _HEAD_DIM_WHEN_UNSAID)
    rope = rope_spec(config, dim, max_seq_len)
    act = common.activation(config)
    bias = config.flag("attention_bias", False)
    intermediate = config.integer("intermediate_size")

    def layer(index: int, prefix: str) -> LayerSpec:
        attention = common.attention(
            config,
            prefix,
            rope,
            dim=dim,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            window=qwen_window(config, index),
        )
        mlp = common.gated_mlp(config, f"{prefix}.mlp", intermediate, act)
        return common.layer_spec(config, prefix, attention, mlp)

    return common.decoder(config, "qwen3", layer)
