"""Mixtral: Mistral with routed experts on every layer."""

from trtc.builder.families import common, mixture
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, LayerSpec


def mixtral(config: Config, max_seq_len: int) -> DecoderSpec:
    """MixtralForCausalLM."""
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len, default_theta=1e6)
    window = config.optional_integer("sliding_window")

    def layer(_index: int, prefix: str) -> LayerSpec:
        attention = common.attention(config, prefix, rope, dim=dim, window=window)
        experts = mixture.softmax_experts(
            config,
            f"{prefix}.block_sparse_moe",
            config.integer("intermediate_size"),
            experts=config.integer("num_local_experts"),
            renormalize=True,
            names=mixture.NUMBERED,
        )
        return common.layer_spec(config, prefix, attention, experts)

    return common.decoder(config, "mixtral", layer)
