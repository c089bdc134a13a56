"""Mixtral: Mistral with routed experts on every layer."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.rope import rope_spec
from trtc.builder.spec import DecoderSpec, LayerSpec, LinearSpec, MoeMlpSpec


def mixtral(config: Config, max_seq_len: int) -> DecoderSpec:
    """MixtralForCausalLM."""
    dim = common.head_dim(config)
    rope = rope_spec(config, dim, max_seq_len, default_theta=1e6)
    window = config.optional_integer("sliding_window")

    def layer(_index: int, prefix: str) -> LayerSpec:
        attention = common.attention(config, prefix, rope, dim=dim, window=window)
        return common.layer_spec(config, prefix, attention, _experts(config, prefix))

    return common.decoder(config, "mixtral", layer)


def _experts(config: Config, layer: str) -> MoeMlpSpec:
    act = common.activation(config)
    prefix = f"{layer}.block_sparse_moe"
    experts = config.integer("num_local_experts")
    width = config.integer("intermediate_size")
    return MoeMlpSpec(
        router=LinearSpec(f"{prefix}.gate", config.integer("hidden_size"), experts),
        experts=tuple(
            common.gated_mlp(
                config, f"{prefix}.experts.{expert}", width, act, names=("w1", "w3", "w2")
            )
            for expert in range(experts)
        ),
        top_k=config.integer("num_experts_per_tok"),
        renormalize=True,
    )
