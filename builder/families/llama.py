"""Llama 2 and 3.x."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, LayerSpec


def llama(config: Config, max_seq_len: int) -> DecoderSpec:
    """LlamaForCausalLM."""
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    act = common.activation(config)
    attention_bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    intermediate = config.integer("intermediate_size")

    def layer(_index: int, prefix: str) -> LayerSpec:
        return common.pre_norm_layer(
            config,
            prefix,
            common.attention(
                config, prefix, rope, dim=dim, qkv_bias=attention_bias, o_bias=attention_bias
            ),
            common.gated_mlp(config, f"{prefix}.mlp", intermediate, act, bias=mlp_bias),
        )

    return common.decoder(config, "llama", layer)
