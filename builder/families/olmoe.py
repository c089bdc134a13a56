"""OLMoE: routed experts on every layer, norms over all heads of q and of k."""

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, LayerSpec


def olmoe(config: Config, max_seq_len: int) -> DecoderSpec:
    """OlmoeForCausalLM."""
    config.require("clip_qkv", (None,), None)
    config = config.with_defaults(rms_norm_eps=1e-5)
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len)
    bias = config.flag("attention_bias", False)

    def layer(_index: int, prefix: str) -> LayerSpec:
        attention = common.attention(
            config, prefix, rope, dim=dim, qkv_bias=bias, o_bias=bias, qk_norm="row"
        )
        width = config.integer("intermediate_size")
        experts = mixture.softmax_experts(config, f"{prefix}.mlp", width, experts=64, top_k=8)
        return common.layer_spec(config, prefix, attention, experts)

    return common.decoder(config, "olmoe", layer)
