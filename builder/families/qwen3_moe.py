"""Qwen3-MoE: Qwen3 with routed experts on most layers."""

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, DenseMlpSpec, LayerSpec, MoeMlpSpec


def qwen3_moe(config: Config, max_seq_len: int) -> DecoderSpec:
    """Qwen3MoeForCausalLM."""
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    bias = config.flag("attention_bias", False)
    windowed = config.flag("use_sliding_window", False)
    window = config.integer("sliding_window", 4096) if windowed else None

    def layer(index: int, prefix: str) -> LayerSpec:
        attention = common.attention(
            config,
            prefix,
            rope,
            dim=dim,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            window=window,
        )
        return common.layer_spec(config, prefix, attention, _mlp(config, index, prefix))

    return common.decoder(config, "qwen3_moe", layer)


def _mlp(config: Config, index: int, layer: str) -> DenseMlpSpec | MoeMlpSpec:
    prefix = f"{layer}.mlp"
    if not mixture.is_sparse_layer(config, index):
        width, act = config.integer("intermediate_size"), common.activation(config)
        return common.gated_mlp(config, prefix, width, act)
    return mixture.softmax_experts(config, prefix, config.integer("moe_intermediate_size"))
